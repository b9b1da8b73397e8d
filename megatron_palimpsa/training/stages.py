"""Where a stage's first weights come from: the checkpoint another stage ended with; nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_palimpsa.config import ConfigError, StageConfig, load_stage
from megatron_palimpsa.training.checkpoint_state import require_same_model
from megatron_palimpsa.training.run_folder import RunFolder


@dataclass(frozen=True)
class Source:
    """The checkpoint that a stage starts from."""

    checkpoint: Path
    load: Literal["weights", "weights+optimizer"]


def find_source(config: StageConfig) -> Source | None:
    """The checkpoint that `init_from` names; None where the stage starts from random weights.

    Raises:
        ConfigError: no such stage, a stage that is not complete, or one with another model.
    """
    if config.init_from is None:
        return None
    folder = RunFolder(_stage_folder(config, config.init_from.stage))
    key = f"init_from.stage={config.init_from.stage!r}"
    if not folder.path.is_dir():
        raise ConfigError(f"{key}: there is no stage folder {folder.path}")
    marker = folder.read_marker()
    if marker is None:
        raise ConfigError(f"{key}: that stage is not complete ({folder.marker} is missing); train it to its end first")
    checkpoint = folder.path / marker["checkpoint"]
    if not checkpoint.is_dir():
        raise ConfigError(f"{key}: its last checkpoint {checkpoint} is missing")
    require_same_model(checkpoint, config.model)
    there = load_stage(folder.config).model
    if config.init_from.load == "weights+optimizer" and there.train_prior != config.model.train_prior:
        raise ConfigError(
            f"{key}: model.train_prior={config.model.train_prior} (there {there.train_prior}) changes which parameters "
            f"have optimizer moments; set init_from.load=weights"
        )
    return Source(checkpoint, config.init_from.load)


def _stage_folder(config: StageConfig, stage: str) -> Path:
    sibling = Path(config.output_dir) / stage
    folder = Path(stage) if "/" in stage and not sibling.is_dir() else sibling
    if folder.resolve() == config.folder.resolve():
        raise ConfigError(f"init_from.stage={stage!r} is the stage itself")
    return folder
