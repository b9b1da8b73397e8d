"""Checkpoint folders on disk: complete and intact under their name, or not there.

`step-N` folders appear by one rename, with a manifest of every file's size and checksum and a marker written last;
`latest` names one of them and is replaced by a rename. Nothing here needs torch or a process group.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

STATE, MANIFEST, COMPLETE, LATEST = "state.json", "manifest.json", "COMPLETE", "latest"

log = logging.getLogger(__name__)


def prepare(folder: Path, temporary: Path) -> None:
    """Make the folder to save into and remove what killed saves left behind."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".tmp-*"):
        shutil.rmtree(leftover)
    temporary.mkdir()


def seal(temporary: Path, state: dict[str, Any]) -> None:
    """Add `state`, the manifest (every file is read back for it) and, last, the marker."""
    _write(temporary / STATE, json.dumps(state, indent=1))
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(temporary.iterdir())}
    _write(temporary / MANIFEST, json.dumps(files, indent=1))
    _write(temporary / COMPLETE, _sha256(temporary / MANIFEST))
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
    _write(pointer, final.name)
    pointer.replace(folder / LATEST)
    _sync_folder(folder)
    for replaced in folder.glob(".tmp-replaced-*"):
        shutil.rmtree(replaced)
    complete = [path for path in _steps(folder) if _step(path) <= _step(final) and (path / COMPLETE).exists()]
    for path in complete[keep:]:
        # Out of sight by one rename, so that a kill in between leaves no half of a checkpoint.
        shutil.rmtree(path.rename(folder / f".tmp-pruned-{path.name}"))


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


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
    candidates = _steps(folder)
    try:
        named = folder / (folder / LATEST).read_text(errors="replace").strip()
    except FileNotFoundError:
        named = None
        if candidates:
            log.warning("%s: the file %s is missing; looking for the newest checkpoint", folder, LATEST)
    if named is not None:
        if named not in candidates:
            log.warning("%s: %s names %s, which is not there; looking for one before it", folder, LATEST, named.name)
        if re.fullmatch(r"step-\d+", named.name):
            candidates = [path for path in candidates if _step(path) <= _step(named)]
    for path in candidates:
        fault = _fault(path)
        if fault is None:
            return path
        log.warning("checkpoint %s is damaged (%s) and is passed over", path, fault)
    return None


def _steps(folder: Path) -> list[Path]:
    """Checkpoints by falling step."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _fault(path: Path) -> str | None:
    """What is wrong with a checkpoint; None if every file is as it was saved."""
    try:
        if (path / COMPLETE).read_bytes() != _sha256(path / MANIFEST).encode():
            return f"{MANIFEST} does not match {COMPLETE}"
        manifest = json.loads((path / MANIFEST).read_text())
        for name, expected in manifest.items():
            if (path / name).stat().st_size != expected["bytes"]:
                return f"{name} has {(path / name).stat().st_size} bytes instead of {expected['bytes']}"
            if _sha256(path / name) != expected["sha256"]:
                return f"{name} does not match its checksum"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"{Path(error.filename or path).name} cannot be read: {error.strerror}"
    return None
