"""One configuration: build the engine, train, measure, and leave the process as it was."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_palimpsa import parallel
from megatron_palimpsa.bench.batches import own_batches, random_batches
from megatron_palimpsa.bench.profile import kernels_of, shares
from megatron_palimpsa.bench.saving import Saving, measure_saving
from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.engine.base import Engine, StepResult
from megatron_palimpsa.engine.select import build_engine
from megatron_palimpsa.training import ranks
from megatron_palimpsa.training.batch import Batch


@dataclass(frozen=True)
class Plan:
    """How each configuration is measured."""

    warmup: int
    """Steps before the clock. The first compiles kernels and makes Adam's moments; there is at least one."""
    steps: int
    """Timed ones."""
    own_data: bool = False
    """On the stage's training data instead of random tokens."""
    profile: bool = False
    """Profile one more step, on a GPU."""


@dataclass(frozen=True)
class Measurement:
    """What a configuration took; memory is the largest of all ranks, in bytes, None without CUDA."""

    parameters: int
    flops_per_token: float
    build_seconds: float
    first_step_seconds: float
    step_seconds: list[float]
    """Of each timed step."""
    losses: list[float]
    """Of every step, those before the clock included."""
    grad_norms: list[float]
    static_bytes: int | None
    """Allocated between two steps: weights, gradients, optimizer."""
    peak_bytes: int | None
    """Allocated at most, building included."""
    reserved_bytes: int | None
    """What the allocator took from the device at most."""
    beside_bytes: int | None
    """Used on the device beside that: the CUDA context, NCCL, kernels, and other processes."""
    shares: dict[str, float] | None = None
    """Of rank 0's step by part, as in `bench.profile`; None where no step was profiled."""
    saving: Saving | None = None

    @property
    def loss(self) -> float:
        """Of the last step."""
        return self.losses[-1]

    @property
    def grad_norm(self) -> float:
        return self.grad_norms[-1]

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.step_seconds)


def measure(config: StageConfig, plan: Plan, *, save: Path | None = None) -> Measurement:
    """Train as planned. Every rank calls it with the same arguments.

    With `save` the state is then saved in the background to that folder, where the checkpoint stays.

    Raises:
        ConfigError: the stage's own data is not there, or does not fit.
        torch.OutOfMemoryError: the configuration does not fit; one rank alone gives back what it held, one of several
            touches nothing, because the others may be in a collective.
    """
    try:
        measured = _measure(config, plan, save)
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


def _measure(config: StageConfig, plan: Plan, save: Path | None) -> Measurement:
    _give_back()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    parallel.initialize(config.parallel, config.seed)
    # First: the stage's own data may not be there.
    batches = _batches(config, plan)
    start = _now()
    with contextlib.closing(build_engine(config)) as engine:
        build_seconds = _now() - start
        return _steps(engine, batches, build_seconds, plan, save)


def _batches(config: StageConfig, plan: Plan) -> Iterator[Batch]:
    """Of this data-parallel rank."""
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    return (own_batches if plan.own_data else random_batches)(config, rank, size)


def _steps(
    engine: Engine, batches: Iterator[Batch], build_seconds: float, plan: Plan, save: Path | None
) -> Measurement:
    def step() -> tuple[StepResult, float]:
        start = _now()
        result = engine.train_step(batches, lambda loss, grad_norm: True)
        return result, _now() - start

    warmup = max(1, plan.warmup)
    results, seconds = zip(*(step() for _ in range(warmup + plan.steps)), strict=True)
    measured = Measurement(
        parameters=engine.num_parameters,
        flops_per_token=engine.model_flops_per_token,
        build_seconds=build_seconds,
        first_step_seconds=seconds[0],
        step_seconds=list(seconds[warmup:]),
        losses=[result.loss for result in results],
        grad_norms=[result.grad_norm for result in results],
        static_bytes=_largest(torch.cuda.memory_allocated),
        peak_bytes=_largest(torch.cuda.max_memory_allocated),
        reserved_bytes=_largest(torch.cuda.max_memory_reserved),
        beside_bytes=_largest(_beside),
        shares=shares(*kernels_of(step)) if plan.profile and torch.cuda.is_available() else None,
    )
    if save is None:
        return measured
    return replace(measured, saving=measure_saving(engine, lambda: step()[1], save))


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
