"""Checkpoint folders on disk: complete and intact under their name, or not there.

`step-N` folders appear by one rename, with a manifest of every file's size and checksum and a marker written last;
`latest` names one of them and is replaced by a rename. Nothing here needs torch or a process group.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STATE, MANIFEST, COMPLETE, LATEST = "state.json", "manifest.json", "COMPLETE", "latest"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileRecord:
    """A file as it was written."""

    bytes: int
    sha256: str


def prepare(folder: Path, temporary: Path, needed: int = 0) -> None:
    """Make the folder to save into and remove what killed saves left behind.

    Raises:
        OSError: among others, where fewer than `needed` bytes are free (ENOSPC).
    """
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".tmp-*"):
        shutil.rmtree(leftover)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{free / 1e9:.3g} GB are free, {needed / 1e9:.3g} GB needed", str(folder))
    temporary.mkdir()


def seal(temporary: Path, state: dict[str, Any], records: dict[str, FileRecord]) -> None:
    """Add `state`, the manifest of all files (`records` are of those there) and, last, the marker."""
    records = {**records, STATE: write_file(temporary / STATE, json.dumps(state, indent=1).encode())}
    manifest = {name: asdict(records[name]) for name in sorted(records)}
    sealed = write_file(temporary / MANIFEST, json.dumps(manifest, indent=1).encode())
    write_file(temporary / COMPLETE, sealed.sha256.encode())
    _sync_folder(temporary)


def publish(temporary: Path, final: Path, keep: int) -> None:
    """Give a sealed checkpoint its name, make it the latest and remove all but the newest `keep` up to it."""
    folder = final.parent
    if final.exists():
        # A damaged one, or one of a continuation that was given up.
        final.rename(folder / f".tmp-replaced-{final.name}")
    temporary.rename(final)
    _sync_folder(folder)
    pointer = folder / f".{LATEST}"
    write_file(pointer, final.name.encode())
    pointer.replace(folder / LATEST)
    _sync_folder(folder)
    for replaced in folder.glob(".tmp-replaced-*"):
        shutil.rmtree(replaced)
    complete = [path for path in _steps(folder) if _step(path) <= _step(final) and (path / COMPLETE).exists()]
    for path in complete[keep:]:
        # Out of sight by one rename, so that a kill in between leaves no half of a checkpoint.
        shutil.rmtree(path.rename(folder / f".tmp-pruned-{path.name}"))


def write_file(path: Path, content: bytes) -> FileRecord:
    """Write a file and force it to disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(len(content), hashlib.sha256(content).hexdigest())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def latest_intact(folder: Path) -> Path | None:
    """The checkpoint that `latest` names or the newest intact one before it; warns about each passed over."""
    for path in candidates(folder):
        found = fault(path)
        if found is None:
            return path
        warn_of_damage(path, found)
    return None


def warn_of_damage(path: Path, found: str) -> None:
    log.warning("checkpoint %s is damaged (%s) and is passed over", path, found)


def candidates(folder: Path) -> list[Path]:
    """The checkpoint that `latest` names and those before it, newest first; warns where `latest` is of no use."""
    found = _steps(folder)
    try:
        named = folder / (folder / LATEST).read_text(errors="replace").strip()
    except FileNotFoundError:
        if found:
            log.warning("%s: the file %s is missing; looking for the newest checkpoint", folder, LATEST)
        return found
    if named not in found:
        log.warning("%s: %s names %s, which is not there; looking for one before it", folder, LATEST, named.name)
    if re.fullmatch(r"step-\d+", named.name):
        found = [path for path in found if _step(path) <= _step(named)]
    return found


def _steps(folder: Path) -> list[Path]:
    """Checkpoints by falling step."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def fault(path: Path, reader: int = 0, readers: int = 1) -> str | None:
    """What is wrong with a checkpoint; None if every file is as it was saved.

    Each of several `readers` looks at a share of the files, about equal in bytes.
    """
    try:
        if (path / COMPLETE).read_bytes() != _sha256(path / MANIFEST).encode():
            return f"{MANIFEST} does not match {COMPLETE}"
        manifest = json.loads((path / MANIFEST).read_text())
        for name in _reader_share({name: record["bytes"] for name, record in manifest.items()}, reader, readers):
            expected = manifest[name]
            if (path / name).stat().st_size != expected["bytes"]:
                return f"{name} has {(path / name).stat().st_size} bytes instead of {expected['bytes']}"
            if _sha256(path / name) != expected["sha256"]:
                return f"{name} does not match its checksum"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"{Path(error.filename or path).name} cannot be read: {error.strerror}"
    return None


def _reader_share(sizes: dict[str, int], reader: int, readers: int) -> Iterable[str]:
    loads = [0] * readers
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        lightest = loads.index(min(loads))
        loads[lightest] += sizes[name]
        if lightest == reader:
            yield name
