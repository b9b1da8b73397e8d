"""One configuration: build the engine, train, measure, and leave the process as it was."""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_palimpsa import parallel
from megatron_palimpsa.bench.batches import random_batch
from megatron_palimpsa.bench.saving import Saving, measure_saving
from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.engine.base import Engine, StepResult
from megatron_palimpsa.engine.select import build_engine
from megatron_palimpsa.training import ranks

_DISTINCT_BATCHES = 8


@dataclass(frozen=True)
class Measurement:
    """What a configuration took; memory is the largest of all ranks, in bytes, None without CUDA."""

    parameters: int
    flops_per_token: float
    build_seconds: float
    first_step_seconds: float
    step_seconds: list[float]
    """Of each timed step."""
    loss: float
    """Of the last step."""
    grad_norm: float
    static_bytes: int | None
    """Allocated between two steps: weights, gradients, optimizer."""
    peak_bytes: int | None
    """Allocated at most, building included."""
    reserved_bytes: int | None
    """What the allocator took from the device at most."""
    beside_bytes: int | None
    """Used on the device beside that: the CUDA context, NCCL, kernels, and other processes."""
    saving: Saving | None = None

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.step_seconds)


def measure(config: StageConfig, *, warmup: int, steps: int, save: Path | None = None) -> Measurement:
    """Train `warmup` steps and `steps` timed ones on random tokens. Every rank calls it with the same arguments.

    The first warm-up step compiles kernels and makes Adam's moments; there is at least one. With `save` the state is
    then saved in the background to that folder, where the checkpoint stays.

    Raises:
        torch.OutOfMemoryError: the configuration does not fit; one rank alone gives back what it held, one of several
            touches nothing, because the others may be in a collective.
    """
    try:
        measured = _measure(config, max(1, warmup), steps, save)
    except BaseException:
        if parallel.is_alone():
            _leave()
        raise
    _leave()
    return measured


def _leave() -> None:
    # The process group stays: the next case may split it differently.
    parallel.leave_layout()
    _give_back()


def _measure(config: StageConfig, warmup: int, steps: int, save: Path | None) -> Measurement:
    _give_back()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    start = _now()
    parallel.initialize(config.parallel, config.seed)
    with contextlib.closing(build_engine(config)) as engine:
        build_seconds = _now() - start
        return _steps(engine, build_seconds, warmup, steps, save)


def _steps(engine: Engine, build_seconds: float, warmup: int, steps: int, save: Path | None) -> Measurement:
    batches = itertools.cycle(_batches(engine.config))

    def step() -> tuple[StepResult, float]:
        start = _now()
        result = engine.train_step(batches, lambda loss, grad_norm: True)
        return result, _now() - start

    results, seconds = zip(*(step() for _ in range(warmup + steps)), strict=True)
    result = results[-1]
    measured = Measurement(
        parameters=engine.num_parameters,
        flops_per_token=engine.model_flops_per_token,
        build_seconds=build_seconds,
        first_step_seconds=seconds[0],
        step_seconds=list(seconds[warmup:]),
        loss=result.loss,
        grad_norm=result.grad_norm,
        static_bytes=_largest(torch.cuda.memory_allocated),
        peak_bytes=_largest(torch.cuda.max_memory_allocated),
        reserved_bytes=_largest(torch.cuda.max_memory_reserved),
        beside_bytes=_largest(_beside),
    )
    if save is None:
        return measured
    return replace(measured, saving=measure_saving(engine, lambda: step()[1], save))


def _batches(config: StageConfig) -> list[Any]:
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    count = min(_DISTINCT_BATCHES, config.num_microbatches(size))
    return [random_batch(config, seed=config.seed + rank * count + index) for index in range(count)]


def _beside() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _largest(count: Any) -> int | None:
    return ranks.largest(count()) if torch.cuda.is_available() else None


def _give_back() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
