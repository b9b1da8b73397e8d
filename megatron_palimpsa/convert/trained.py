"""A stage of ours as what a conversion starts from."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from megatron_palimpsa.config import ConfigError, StageConfig, load_stage
from megatron_palimpsa.training import checkpoint_files as files
from megatron_palimpsa.training.checkpoint_state import read_state, require_same_model
from megatron_palimpsa.training.run_folder import RunFolder
from megatron_palimpsa.training.saved import no_stage, stage_of_checkpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """A checkpoint and the stage it belongs to."""

    config: StageConfig
    checkpoint: Path
    step: int
    optimizer_steps: int
    """0: there are no moments, or none of use."""
    tokenizer: Path | None


def find_trained(source: Path) -> Trained:
    """The last checkpoint of the complete stage `source`, or the checkpoint `source` of one, complete or not.

    Its files are not read yet, see `require_intact`.

    Raises:
        ConfigError: it is neither, or what belongs to it is missing.
    """
    of_checkpoint = stage_of_checkpoint(source)
    folder = RunFolder(of_checkpoint or source)
    if not source.is_dir():
        raise ConfigError(f"{source}: no such folder")
    if not folder.config.is_file():
        raise no_stage(folder)
    config = load_stage(folder.config)
    checkpoint = source if of_checkpoint else _last_checkpoint(folder)
    require_same_model(checkpoint, config.model)
    tokenizer = Path(config.data.tokenizer) if config.data.tokenizer else None
    if tokenizer is not None and not tokenizer.is_file():
        raise ConfigError(
            f"{folder.config}: data.tokenizer={config.data.tokenizer!r} is not there; a relative path starts at the "
            f"folder that the command is run in"
        )
    state = read_state(checkpoint)
    return Trained(config, checkpoint, state["step"], state["optimizer_steps"], tokenizer)


def _last_checkpoint(folder: RunFolder) -> Path:
    marker = folder.read_marker()
    if marker is None:
        raise ConfigError(
            f"{folder.path}: that stage is not complete ({folder.marker.name} is missing); train it to its end, or "
            f"name one of its checkpoints ({folder.checkpoints}/step-N)"
        )
    checkpoint = folder.path / str(marker["checkpoint"])
    if not checkpoint.is_dir():
        raise ConfigError(f"{folder.path}: its last checkpoint {checkpoint} is missing")
    return checkpoint


def require_intact(checkpoint: Path) -> None:
    """Read all of a checkpoint and compare it with its checksums.

    Raises:
        ConfigError: it is not as it was saved.
    """
    logger.info("Checking %s", checkpoint)
    if (found := files.fault(checkpoint)) is not None:
        raise ConfigError(f"checkpoint {checkpoint} is damaged: {found}")
