"""A model as it was saved: the stage it belongs to and its checkpoint; nothing here needs a process group."""

from __future__ import annotations

from pathlib import Path

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.training import checkpoint_files as files
from megatron_palimpsa.training.run_folder import RunFolder


def is_stage(source: Path) -> bool:
    """Whether the path is a stage's folder or the place of one of its checkpoints."""
    return stage_of_checkpoint(source) is not None or RunFolder(source).config.is_file()


def stage_of_checkpoint(source: Path) -> Path | None:
    """The folder of the stage where `source` is the place of a checkpoint; None where it is not."""
    # From within a stage too: `step-8` or `.`.
    whole = source.absolute()
    is_checkpoint = whole.name.startswith("step-") and whole.parent.name == "checkpoints"
    return whole.parent.parent if is_checkpoint else None


def folder_of(source: Path) -> RunFolder:
    """The folder of the stage that `source` is, or is a checkpoint of.

    Raises:
        ConfigError: there is none.
    """
    folder = RunFolder(stage_of_checkpoint(source) or source)
    if not folder.config.is_file():
        raise no_stage(folder)
    return folder


def no_stage(folder: RunFolder) -> ConfigError:
    """What to say of a folder without a stage's configuration."""
    hint = ""
    if (folder.path / "config.json").is_file():
        hint = "; `convert mamba2` makes one of a published Mamba2 model, `convert huggingface` of what `export` wrote"
    return ConfigError(f"{folder.path}: holds no stage ({folder.config.name} is missing){hint}")


def find_saved(source: Path) -> tuple[RunFolder, Path]:
    """The stage's folder and its newest intact checkpoint, or the one that `source` names (`checkpoints/step-N`).

    Raises:
        ConfigError: the folder holds no stage, or no intact checkpoint; the named one is damaged.
    """
    folder = folder_of(source)
    if stage_of_checkpoint(source) is not None:
        if (found := files.fault(source)) is not None:
            raise ConfigError(f"checkpoint {source} is damaged: {found}")
        return folder, source
    if (path := files.latest_intact(folder.checkpoints)) is None:
        raise ConfigError(f"{folder.checkpoints}: holds no intact checkpoint")
    return folder, path
