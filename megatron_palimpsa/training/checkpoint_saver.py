"""Saving while training goes on: copy, write, publish.

Training stops for the copy of each rank's share to host memory. A thread of each rank then writes the rank's file, and
when all have, a thread of rank 0 writes the index and the manifest and publishes. Process groups are used by the main
thread alone, at step boundaries: all ranks compare how far their threads are.

Beside what it trains with a rank holds one copy of its share in host memory (kept for the next save) and one box of at
most 64 MiB; not in the background, the box alone.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import shutil
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from megatron_palimpsa.engine.base import Engine
from megatron_palimpsa.engine.boxes import Box
from megatron_palimpsa.training import checkpoint_files as files
from megatron_palimpsa.training import ranks
from megatron_palimpsa.training.background import Background, Status
from megatron_palimpsa.training.checkpoint_copy import HostCopy
from megatron_palimpsa.training.checkpoint_format import (
    Cancelled,
    CheckpointError,
    RankFile,
    SaveError,
    write_index,
    write_rank_file,
)
from megatron_palimpsa.training.checkpoint_random import layout, random_shares
from megatron_palimpsa.training.checkpoint_state import FORMAT_VERSION, fingerprint

logger = logging.getLogger(__name__)

_SURROUNDINGS = 2**20
"""Bytes a rank's share of the index and what torch puts around tensors take, at most about."""


@dataclass
class _Save:
    """A checkpoint on its way."""

    step: int
    final: Path
    temporary: Path
    state: dict[str, Any]
    task: Background[Any]
    stopped: float
    """Seconds for which training stood still."""
    written: bool = False
    """Whether every rank's file is there."""


class Checkpointer:
    """Saves a run's checkpoints. What is not said to be local is collective and called by the main thread."""

    def __init__(
        self, folder: Path, engine: Engine, keep: int, background: bool, saved_step: int | None = None
    ) -> None:
        """
        Args:
            folder: the run's `checkpoints` folder; created if missing.
            keep: complete checkpoints to leave, the new one included.
            background: go on training while it is written.
            saved_step: of the newest checkpoint there.
        """
        self.saved_step = saved_step
        """Step of the newest checkpoint that is complete on disk."""
        self._folder = folder
        self._engine = engine
        self._keep = keep
        self._background = background
        self._copy = HostCopy()
        self._save: _Save | None = None

    def reserve(self) -> None:
        """Have the copy's memory now, so that training does not wait for it at the first save. Local."""
        if self._background:
            # Where it cannot be had the first save says so, on all ranks.
            with contextlib.suppress(RuntimeError, MemoryError):
                self._copy.reserve(self._values())

    def _values(self) -> list[tuple[Box, Tensor]]:
        return self._engine.state_share() + random_shares()

    def save(self, step: int, progress: dict[str, Any]) -> None:
        """Save everything a resumed run needs; in the background where that is set, else it returns when it is done.

        A save that is still on its way is completed first; a step that is saved or on its way is not saved again.

        Args:
            progress: the loop's own position, as JSON has it; given back by `checkpoint.load`.

        Raises:
            SaveError: on every rank, where any rank could not write (disk full, for instance); the checkpoints
                there before are untouched and nothing half-written has a checkpoint's name.
        """
        self.finish()
        if step == self.saved_step:
            return
        start = time.monotonic()
        final = self._folder / f"step-{step}"
        temporary = self._folder / f".tmp-{final.name}"
        state = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "model": fingerprint(self._engine.config.model),
            "layout": layout(),
            "optimizer_steps": self._engine.optimizer_steps,
            "scheduler": self._engine.scheduler_state(),
            "progress": progress,
        }
        values = self._values()
        sizes = ranks.to_main(sum(value.numel() * value.element_size() for _, value in values))
        try:
            ranks.on_main(lambda: files.prepare(self._folder, temporary, sum(sizes) + len(sizes) * _SURROUNDINGS))
        except OSError as error:
            raise _failed(final, _reason(error)) from error
        task = self._write(temporary, values)
        self._save = _Save(step, final, temporary, state, task, time.monotonic() - start)
        if not self._background:
            self.finish()

    def _write(self, temporary: Path, values: list[tuple[Box, Tensor]]) -> Background[RankFile]:
        rank = dist.get_rank()
        if self._background:
            try:
                values = self._copy.take(values)
            except (RuntimeError, MemoryError) as error:
                # The others may have had the memory: all hear of it when they compare.
                return Background(_raise(error))

        def write(cancelled: threading.Event) -> RankFile:
            start = time.monotonic()
            file = write_rank_file(temporary, rank, values, cancelled)
            return replace(file, seconds=time.monotonic() - start)

        return Background(write)

    def poll(self) -> None:
        """At a step boundary: see to a save on its way; without one nothing happens.

        Raises:
            SaveError: as `save`.
        """
        save = self._save
        if save is None:
            return
        status = ranks.largest(save.task.status)
        if status == Status.FAILED:
            self._save = None
            save.task.cancel()
            reasons = ranks.to_all(_reason(save.task.error))
            if ranks.is_main():
                shutil.rmtree(save.temporary, ignore_errors=True)
            reason = next((f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text), "a writer died")
            raise _failed(save.final, reason)
        if status == Status.RUNNING:
            return
        if save.written:
            self._save = None
            self.saved_step = save.step
        else:
            save.written = True
            written = ranks.to_main((cast(RankFile, save.task.result), save.stopped))
            save.task = Background(lambda _: self._publish(save, written) if written else None)

    def _publish(self, save: _Save, written: list[tuple[RankFile, float]]) -> None:
        rank_files = [file for file, _ in written]
        files.seal(save.temporary, save.state, write_index(save.temporary, rank_files))
        files.publish(save.temporary, save.final, self._keep)
        logger.info(
            "Checkpoint %s: training stopped for %.2f s, %.3g GB written in %.2f s",
            save.final,
            max(stopped for _, stopped in written),
            sum(file.record.bytes for file in rank_files) / 1e9,
            max(file.seconds for file in rank_files),
        )

    def finish(self) -> None:
        """Wait until no save is on its way.

        Raises:
            SaveError: as `save`.
        """
        while self._save is not None:
            self._save.task.join()
            self.poll()

    def close(self) -> None:
        """Let the copy's memory go; after `finish` or `leave`. Local."""
        self._copy.release()

    def leave(self, complete: bool) -> None:
        """When training ends with an error: local, for the other ranks may be waiting elsewhere.

        One process alone completes the save on its way if `complete`. Otherwise it is given up: the checkpoint before
        it stays the latest.
        """
        if self._save is None:
            return
        if complete and dist.get_world_size() == 1:
            try:
                self.finish()
            except CheckpointError as error:
                logger.error("%s", error)
        else:
            self._save.task.cancel()
            self._save = None


def _raise(error: BaseException) -> Any:
    def work(_: threading.Event) -> None:
        raise error

    return work


def _failed(final: Path, reason: str) -> SaveError:
    return SaveError(
        f"{final}: could not be saved ({reason}); the checkpoints before it are untouched: "
        "when that is mended, start the same command again to go on from the last"
    )


def _reason(error: BaseException | None) -> str:
    """Empty where it was not this rank that failed."""
    if error is None or isinstance(error, Cancelled):
        return ""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"no space left on the disk: {error.strerror}"
    return str(error) or type(error).__name__
