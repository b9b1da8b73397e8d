"""Writing files so that a kill or a full disk at any moment leaves either the old state or the new one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from palimpsa_data.errors import DataError
from palimpsa_data.locks import this_process


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_bytes(value: Any) -> bytes:
    """The one spelling of a JSON document here, so that equal content means equal bytes."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def json_sha256(value: Any) -> str:
    return hashlib.sha256(json_bytes(value)).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Raises DataError naming the file when it is missing or is not a JSON object."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def fsync(path: Path) -> None:
    """Flush a file's content, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(path: Path) -> None:
    """Turn `path`.tmp, already on the disk, into `path`."""
    temporary(path).replace(path)
    fsync(path.parent)


def own_temporary(path: Path) -> Path:
    """This process's own temporary name, for files that several processes may write at the same time."""
    return path.with_name(f"{path.name}.{this_process()}.tmp")


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by one rename, after its content has reached the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        temporary(path).write_bytes(content)
        fsync(temporary(path))
        publish(path)
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {error.strerror}; make space or change rights, then run again"
        ) from error


def require_free_space(folder: Path, needed: int) -> None:
    """Raises DataError when the disk that holds `folder` (which exists) has fewer than `needed` bytes left."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DataError(
            f"not enough disk space in {folder}: up to {needed / 2**20:.1f} MiB needed, {free / 2**20:.1f} MiB free"
        )
