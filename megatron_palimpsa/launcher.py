"""What a launcher such as torchrun tells this process through the environment; read in this module only.

`rank` and `world_size` raise ConfigError where the environment says what no launcher does.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from megatron_palimpsa.config import ConfigError

_CPU_SHARE = Path("/sys/fs/cgroup/cpu.max")


def is_launched() -> bool:
    """Whether a launcher started this process, if only one."""
    return "WORLD_SIZE" in os.environ


def rank() -> int:
    """This process's number among `world_size()`."""
    return _ranks()[0]


def local_rank() -> int:
    """The rank within this machine: which of its GPUs is this process's."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def ranks_of_this_machine() -> int:
    """Ranks that share this machine's cores."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def cores() -> int:
    """Of those that this process may use, as many as each rank of the machine may keep busy."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, _share_of_cores() or usable) // ranks_of_this_machine())


def _share_of_cores() -> int | None:
    """Cores whose time a container gets of its machine's; None for all."""
    try:
        quota, period = _CPU_SHARE.read_text().split()
    except (OSError, ValueError):
        return None
    return max(1, int(quota) // int(period)) if quota.isdecimal() and period.isdecimal() and int(period) else None


def world_size() -> int:
    """Ranks that were started, 1 without a launcher."""
    return _ranks()[1]


def is_requeued() -> bool:
    """Whether this is a later attempt of a SLURM job."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


def stop_file() -> Path | None:
    """The file whose appearance asks to save and stop; None where nobody can ask that way."""
    name = os.environ.get("PALIMPSA_STOP_FILE")
    return Path(name) if name else None


def _ranks() -> tuple[int, int]:
    own, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (own.isdecimal() and size.isdecimal() and int(own) < int(size)):
        raise ConfigError(
            f"the environment says RANK={own!r} of WORLD_SIZE={size!r}: start with torchrun or unset both"
        )
    return int(own), int(size)


def require_meeting_place() -> None:
    """Several ranks find each other only where the launcher says.

    Raises:
        ConfigError: it does not.
    """
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if world_size() > 1 and missing:
        raise ConfigError(
            f"the environment says WORLD_SIZE={world_size()} but lacks {', '.join(missing)}: "
            f"start with torchrun or unset it"
        )


def end_at_once(code: int) -> NoReturn:
    """End this process without what Python does at its end: on GPUs that waits for collectives nobody answers any more.

    A launcher then ends the other ranks.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
