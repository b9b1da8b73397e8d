"""Where a stage's first weights come from: the checkpoint another stage ended with; nothing here needs torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
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


def named_source(config: StageConfig) -> Source | None:
    """What `init_from` names, there or not: the stage's folder in place of its last checkpoint."""
    init_from = config.init_from
    return None if init_from is None else Source(_stage_folder(config, init_from.stage), init_from.load)


def follow_source(config: StageConfig) -> StageConfig:
    """With `init_from.pattern` source: the stage, its layers in the order of the one it starts from, if there is one.

    Raises:
        ConfigError: that stage has other numbers of them.
    """
    if config.init_from is None or config.init_from.pattern == "own":
        return config
    folder = RunFolder(_stage_folder(config, config.init_from.stage))
    return _in_order_of(load_stage(folder.config), config) if folder.config.is_file() else config


def _in_order_of(there: StageConfig, config: StageConfig) -> StageConfig:
    if sorted(there.model.layers) != sorted(config.model.layers):
        counts = [
            ", ".join(f"{layers.count(letter)} {letter}" for letter in sorted(set(layers)))
            for layers in (there.model.layers, config.model.layers)
        ]
        raise ConfigError(f"init_from.pattern=source: {there.folder} has layers {counts[0]}, model.pattern {counts[1]}")
    letters = iter(there.model.layers)
    pattern = "".join("|" if letter == "|" else next(letters) for letter in config.model.pattern)
    return replace(config, model=replace(config.model, pattern=pattern))


def planned_source(config: StageConfig, before: Sequence[StageConfig], made: Collection[Path] = ()) -> Source | None:
    """What a stage will start from once the stages `before` it are complete; None where none of them is its source.

    Args:
        made: folders of stages that something before it makes, and that cannot be looked into yet.

    Raises:
        ConfigError: it will not be able to start from there.
    """
    init_from = config.init_from
    if init_from is None:
        return None
    folder = _stage_folder(config, init_from.stage)
    if not folder.exists() and any(path.resolve() == folder.resolve() for path in made):
        return Source(folder, init_from.load)
    for there in before:
        if there.folder.resolve() == folder.resolve():
            key = f"init_from.stage={init_from.stage!r}"
            here = _in_order_of(there, config) if init_from.pattern == "source" else config
            if differing := differences(fingerprint(there.model), here.model, "there"):
                raise ConfigError(f"{key}: trains another model: {differing}")
            _check_fits(there, config, init_from, key)
            return Source(folder / "checkpoints" / f"step-{there.total_steps}", init_from.load)
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
