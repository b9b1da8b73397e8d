"""A model as it was saved: the stage it belongs to and its checkpoint; nothing here needs a process group."""

from __future__ import annotations

from pathlib import Path

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.training import checkpoint_files as files
from megatron_palimpsa.training.run_folder import RunFolder


def is_stage(source: Path) -> bool:
    """Whether the path is a stage's folder or the place of one of its checkpoints."""
    return _is_checkpoint(source) or RunFolder(source).config.is_file()


def folder_of(source: Path) -> RunFolder:
    """The folder of the stage that `source` is, or is a checkpoint of.

    Raises:
        ConfigError: there is none.
    """
    folder = RunFolder(source.parent.parent if _is_checkpoint(source) else source)
    if not folder.config.is_file():
        raise ConfigError(f"{source}: holds no stage ({folder.config.name} is missing)")
    return folder


def find_saved(source: Path) -> tuple[RunFolder, Path]:
    """The stage's folder and its newest intact checkpoint, or the one that `source` names (`checkpoints/step-N`).

    Raises:
        ConfigError: the folder holds no stage, or no intact checkpoint; the named one is damaged.
    """
    folder = folder_of(source)
    if _is_checkpoint(source):
        if (found := files.fault(source)) is not None:
            raise ConfigError(f"checkpoint {source} is damaged: {found}")
        return folder, source
    if (path := files.latest_intact(folder.checkpoints)) is None:
        raise ConfigError(f"{folder.checkpoints}: holds no intact checkpoint")
    return folder, path


def _is_checkpoint(source: Path) -> bool:
    return source.name.startswith("step-") and source.parent.name == "checkpoints"
