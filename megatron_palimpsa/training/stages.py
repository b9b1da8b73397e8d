"""Where a stage's first weights come from: the checkpoint another stage ended with; nothing here needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from palimpsa_data.files import sha256_file

from megatron_palimpsa.config import ConfigError, InitFrom, StageConfig, load_stage
from megatron_palimpsa.training.checkpoint_state import differences, fingerprint, require_same_model
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
    checkpoint = folder.path / str(marker["checkpoint"])
    if not checkpoint.is_dir():
        raise ConfigError(f"{key}: its last checkpoint {checkpoint} is missing")
    require_same_model(checkpoint, config.model)
    _check_fits(load_stage(folder.config), config, config.init_from, key)
    if config.init_from.load == "weights+optimizer" and marker["steps"] == 0:
        raise ConfigError(f"{key}: nothing was trained there, it has weights alone; set init_from.load=weights")
    return Source(checkpoint, config.init_from.load)


def planned_source(config: StageConfig, before: Sequence[StageConfig]) -> Source | None:
    """What a stage will start from once the stages `before` it are complete; None where none of them is its source.

    Raises:
        ConfigError: it will not be able to start from there.
    """
    if config.init_from is None:
        return None
    folder = _stage_folder(config, config.init_from.stage)
    for there in before:
        if there.folder.resolve() == folder.resolve():
            key = f"init_from.stage={config.init_from.stage!r}"
            if differing := differences(fingerprint(there.model), config.model, "there"):
                raise ConfigError(f"{key}: trains another model: {differing}")
            _check_fits(there, config, config.init_from, key)
            return Source(folder / "checkpoints" / f"step-{there.total_steps}", config.init_from.load)
    return None


def _check_fits(there: StageConfig, config: StageConfig, init_from: InitFrom, key: str) -> None:
    _check_same_tokenizer(Path(there.data.tokenizer), Path(config.data.tokenizer), key)
    prior = (config.model.train_prior, there.model.train_prior)
    if init_from.load == "weights+optimizer" and prior[0] != prior[1]:
        raise ConfigError(
            f"{key}: model.train_prior={prior[0]} (there {prior[1]}) changes which parameters have optimizer moments; "
            f"set init_from.load=weights"
        )


def _check_same_tokenizer(there: Path, here: Path, key: str) -> None:
    """Weights know the ids of one tokenizer. One that is no longer where it was cannot be compared."""
    if there.is_file() and here.is_file() and sha256_file(there) != sha256_file(here):
        raise ConfigError(f"{key}: was trained with the tokenizer {there}, which is not data.tokenizer={here}")


def _stage_folder(config: StageConfig, stage: str) -> Path:
    sibling = Path(config.output_dir) / stage
    folder = Path(stage) if "/" in stage and not sibling.is_dir() else sibling
    if folder.resolve() == config.folder.resolve():
        raise ConfigError(f"init_from.stage={stage!r} is the stage itself")
    return folder
