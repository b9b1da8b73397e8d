"""Environment variables of a job's ranks that differ from what their libraries take by themselves, and why.

A job's `variables` go over them. Left alone on purpose, to be set in `variables` where a cluster needs it:
NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME (the network of the first contact, where the fastest one is not found: `ib0`,
or `^docker,lo` for all but these), NCCL_IB_HCA (the InfiniBand adapters to use, where some are for storage),
NCCL_IB_TIMEOUT (a longer patience with links that come back).
"""

from __future__ import annotations

DEFAULTS = {
    "NCCL_DEBUG": ("WARN", "NCCL says in the ranks' logs why it fails; INFO shows which networks and rings it takes."),
    "PYTHONUNBUFFERED": ("1", "The last lines before a kill are in the log."),
}
"""Variable -> value, reason."""


def exports(variables: dict[str, str]) -> list[tuple[str, str, str]]:
    """Every variable, its value, and for a default its reason, else ""."""
    own = {key: (value, "") for key, value in variables.items()}
    return [(key, *pair) for key, pair in sorted((DEFAULTS | own).items())]
