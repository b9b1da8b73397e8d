"""Sharded checkpoints that are either complete and intact or not there.

A checkpoint is a folder `step-N` of Megatron's dist_checkpointing format: weights in float32 and Adam's moments under
the names and in the shapes of the unsplit model, so that any layout, either precision and every engine can load it.
Beside it lie `state.json` (position, schedule, fingerprint of the model), `manifest.json` (bytes and SHA-256 of every
file) and `COMPLETE` (SHA-256 of the manifest), which is written last.

Saving (`checkpoint_saver`) writes to `.tmp-step-N`, each rank its share into a file of its own whose checksum it takes
while it writes, renames once, replaces `latest` by a rename and only then removes checkpoints beyond the newest `keep`.
Loading takes the checkpoint that `latest` names, or the newest intact one before it. Nothing in a checkpoint can run
code when it is loaded.
"""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.engine.base import Engine
from megatron_palimpsa.training import checkpoint_files as files
from megatron_palimpsa.training import ranks
from megatron_palimpsa.training.checkpoint_format import CheckpointError, Reader, SaveError
from megatron_palimpsa.training.checkpoint_random import is_layout, load_random
from megatron_palimpsa.training.checkpoint_saver import Checkpointer
from megatron_palimpsa.training.checkpoint_state import read_state, require_same_model

__all__ = ["CheckpointError", "Checkpointer", "SaveError", "latest", "load", "read_progress", "require_shared", "save"]

_VISIBLE_WITHIN = 30.0
"""Seconds until a new file on a network file system is seen from every node."""


def save(folder: Path, step: int, engine: Engine, progress: dict[str, Any], keep: int) -> Path:
    """Save and return when the checkpoint is on disk and the latest; see `Checkpointer`, which a run keeps. Collective.

    Raises:
        SaveError: as `Checkpointer.save`.
    """
    Checkpointer(folder, engine, keep, background=False).save(step, progress)
    return folder / f"step-{step}"


def require_shared(folder: Path) -> None:
    """Refuse a folder that is not one and the same on all ranks. Collective.

    Raises:
        ConfigError: on every rank; names the ranks that do not see what rank 0 wrote.
    """
    if dist.get_world_size() == 1:
        return

    def write() -> str:
        name = f".seen-{uuid.uuid4().hex}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
        return name

    try:
        name = ranks.on_main(write)
    except OSError as error:
        raise ConfigError(f"output_dir: {folder} cannot be written: {error.strerror}") from None
    blind = [rank for rank, seen in enumerate(ranks.to_all(_appears(folder / name))) if not seen]
    if ranks.is_main():
        (folder / name).unlink()
    if blind:
        raise ConfigError(
            f"output_dir: the ranks {', '.join(map(str, blind))} do not see what rank 0 writes to {folder}; "
            f"checkpoints need a folder on a file system that all nodes share"
        )


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + _VISIBLE_WITHIN
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def latest(folder: Path) -> Path | None:
    """The checkpoint to go on from: the one `latest` names, or the newest intact one before it.

    Every file is read and checked against its checksum; each checkpoint passed over is named in a warning with what
    is wrong with it. Collective where a process group exists (each rank reads a share of the files), local otherwise.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return files.latest_intact(folder)
    for path in ranks.on_main(lambda: files.candidates(folder)):
        faults = ranks.to_all(files.fault(path, dist.get_rank(), dist.get_world_size()))
        found = next((fault for fault in faults if fault is not None), None)
        if found is None:
            return path
        if ranks.is_main():
            files.warn_of_damage(path, found)
    return None


def read_progress(path: Path) -> dict[str, Any]:
    """The `progress` that was saved, without loading anything."""
    return read_state(path)["progress"]


def load(
    path: Path, engine: Engine, *, what: Literal["everything", "weights", "weights+optimizer"] = "everything"
) -> dict[str, Any]:
    """Load a checkpoint under whatever layout the engine has; each rank reads what it needs, and nothing else.

    Args:
        what: `weights` leaves a fresh optimizer and schedule, `weights+optimizer` takes the moments over and starts
            the schedule anew, `everything` continues the stage: schedule and, under the same layout, random states.

    Returns:
        The `progress` that was saved.

    Raises:
        ConfigError: the checkpoint is of another model (the differing settings are named) or of a newer format.
        CheckpointError: it does not hold what it says.
    """
    state = read_state(path)
    require_same_model(path, engine.config.model)
    reader = Reader(path)
    engine.load_weights(reader.read)
    if what != "weights":
        engine.load_moments(reader.read, state["optimizer_steps"])
    if what == "everything":
        engine.load_scheduler_state(state["scheduler"])
        if is_layout(state["layout"]):
            load_random(reader)
    return state["progress"]
