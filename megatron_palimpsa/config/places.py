"""Folders that a command is to write, looked at before it begins."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_palimpsa.config.values import ConfigError


def writable_place(folder: Path, key: str) -> Path:
    """The folder that is to be made or written, or the nearest above it that is there.

    Raises:
        ConfigError: it is no folder, or nothing can be written to it; names `key`, which said where.
    """
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not place.is_dir():
        raise ConfigError(f"{key}: {place} is not a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}: nothing can be written to {place}")
    return place
