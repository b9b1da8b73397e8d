"""What a background save costs a run: how long training stands still, and how it goes on while files are written."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from megatron_palimpsa.engine.base import Engine
from megatron_palimpsa.engine.boxes import Box
from megatron_palimpsa.training import ranks
from megatron_palimpsa.training.checkpoint import Checkpointer
from megatron_palimpsa.training.checkpoint_copy import HostCopy


@dataclass(frozen=True)
class Saving:
    """Of the slowest rank, in seconds."""

    bytes: int
    """The largest share of a rank."""
    copy_seconds: float
    """To copy the share to host memory, and nothing else."""
    stopped_seconds: float
    """For which training stood still."""
    complete_seconds: float
    """From the save's beginning until the checkpoint is on disk."""
    step_seconds: float
    """Median of the steps meanwhile; 0 if the first of them ended behind it."""


def measure_saving(engine: Engine, step: Callable[[], float], folder: Path) -> Saving:
    """Save in the background while `step`, which takes one and returns its seconds, goes on. Collective.

    The checkpoint stays in `folder`.
    """
    values = engine.state_share()
    size = sum(value.numel() * value.element_size() for _, value in values)
    copy_seconds = _copy_seconds(values)
    saver = Checkpointer(folder, engine, keep=1, background=True)
    saver.reserve()
    try:
        start = time.perf_counter()
        saver.save(engine.optimizer_steps, {})
        stopped = time.perf_counter() - start
        during = []
        while saver.saved_step is None:
            during.append(step())
            saver.poll()
        complete = time.perf_counter() - start
    finally:
        saver.close()
    return Saving(
        bytes=ranks.largest(size),
        copy_seconds=max(ranks.to_all(copy_seconds)),
        stopped_seconds=max(ranks.to_all(stopped)),
        complete_seconds=complete,
        step_seconds=statistics.median(during[:-1] or [0.0]),
    )


def _copy_seconds(values: list[tuple[Box, Tensor]]) -> float:
    copy = HostCopy()
    copy.reserve(values)
    start = time.perf_counter()
    copy.take(values)
    seconds = time.perf_counter() - start
    copy.release()
    return seconds
