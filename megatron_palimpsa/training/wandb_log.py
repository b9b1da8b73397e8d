"""Weights & Biases beside the other records: online where a key is, offline files otherwise, never a question."""

from __future__ import annotations

import importlib.util
import logging
import netrc
import os
import secrets
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from megatron_palimpsa.config import ConfigError, StageConfig, to_dict
from megatron_palimpsa.training.metrics import flatten_scalars

logger = logging.getLogger(__name__)

_MODES = ("online", "offline", "disabled", "shared")
_PATIENCE = 60.0  # seconds until a server that does not answer is given up


class WandbLog:
    """One W&B run for the stage, the same one after every resume (its id is kept in the run folder)."""

    def __init__(self, config: StageConfig, folder: Path) -> None:
        import wandb

        options: dict[str, Any] = {
            "project": config.logging.wandb_project,
            "name": config.name,
            "id": run_id(folder),
            "resume": "allow",
            "dir": str(folder),
            "config": to_dict(config),
            "mode": choose_mode(),
            "settings": wandb.Settings(silent=True, init_timeout=_PATIENCE),
        }
        try:
            self._run = wandb.init(**options)
        except wandb.errors.Error as error:
            logger.warning("Weights & Biases does not take this run (%s): it is logged offline", error)
            # Without it the id stays taken by the attempt.
            wandb.teardown()
            options["mode"] = "offline"
            self._run = wandb.init(**options)
        # Steps done again after a resume would be dropped under wandb's own step, which may not fall.
        self._run.define_metric("*", step_metric="step")
        logger.info("Weights & Biases: run %s, %s", self._run.id, options["mode"])

    def write(self, kind: str, **values: Any) -> None:
        scalars = {f"{kind}/{name}": value for name, value in flatten_scalars(values)}
        self._run.log(scalars | {"step": values["step"]})

    def sync(self) -> None:
        """W&B sends on its own."""

    def close(self) -> None:
        self._run.finish()


def check_usable(config: StageConfig) -> None:
    """Refuse a stage that could not log, before it starts.

    Raises:
        ConfigError: the stage logs to Weights & Biases but the package is not installed or WANDB_MODE is none.
    """
    if config.logging.wandb_project is None:
        return
    if choose_mode() not in _MODES:
        raise ConfigError(f"WANDB_MODE={choose_mode()!r} in the environment must be one of {', '.join(_MODES)}")
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"logging.wandb_project={config.logging.wandb_project!r} needs the package wandb: "
            "pip install wandb, or set logging.wandb_project=null"
        )


def choose_mode() -> str:
    """WANDB_MODE where it is set, else `online` with a key in WANDB_API_KEY or netrc, else `offline`."""
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        known = netrc.netrc(os.environ.get("NETRC", str(Path("~/.netrc").expanduser()))).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        known = None
    return "online" if known else "offline"


def run_id(folder: Path) -> str:
    """The id kept in the folder; made on the first call."""
    path = folder / "wandb-run-id"
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()
