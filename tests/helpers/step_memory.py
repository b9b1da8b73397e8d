"""A small stage with the tiles of a large one, and the memory that a step of it takes on a GPU."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from helpers.live_memory import LiveMemory, as_on_a_gpu
from helpers.stages import tiny_stage
from megatron_palimpsa import parallel
from megatron_palimpsa.bench.batches import random_batch
from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.engine.base import Engine
from megatron_palimpsa.engine.deepspeed import DeepSpeedEngine
from megatron_palimpsa.engine.megatron import MegatronEngine
from megatron_palimpsa.engine.select import build_engine

MODEL = {
    "pattern": "MMPM",
    "hidden_size": 128,
    "vocab_size": 400,
    "seq_length": 1024,
    "d_state": 64,
    "headdim": 32,
    "beta_rank": 16,
    "ffn_hidden_size": 192,
}
TRAIN = {"precision": "bf16", "global_batch_tokens": 1024, "tokens": 102400}


def stage(case: dict[str, Any], world_size: int = 1) -> StageConfig:
    model = MODEL | case.get("model", {})
    train = TRAIN | {"global_batch_tokens": model["seq_length"]} | case.get("train", {})
    return tiny_stage(world_size, model=model, train=train, parallel=case.get("parallel", {}))


def measured(config: StageConfig) -> tuple[int, int]:
    """Bytes between steps, and at the peak of a step whose moments are there already."""
    with _engine(config) as (engine, live):
        _train(config, engine, live, lambda loss, grad_norm: True)
        gc.collect()
        return live.live, live.peak


def measured_zero(config: StageConfig) -> tuple[int, int, int]:
    """Under DeepSpeed: bytes at the peak of a step, and on the GPU and in host memory before the optimizer steps."""
    before_update: list[tuple[int, int]] = []
    with _engine(config) as (engine, live):
        assert isinstance(engine, DeepSpeedEngine)

        def accept(loss: float, grad_norm: float) -> bool:
            # Nothing was computed; a gradient that is not finite would keep DeepSpeed from stepping.
            for gradient in engine._gradients_of:
                gradient.zero_()
            host = _offloaded(engine)
            before_update.append((live.live - host, host))
            return True

        _train(config, engine, live, accept)
        return live.peak, *before_update[-1]


@contextlib.contextmanager
def _engine(config: StageConfig) -> Iterator[tuple[Engine, LiveMemory]]:
    with as_on_a_gpu(), LiveMemory() as live:
        parallel.initialize(config.parallel, config.seed)
        with contextlib.closing(build_engine(config)) as engine:
            if isinstance(engine, MegatronEngine):
                _as_on_cuda(engine)
            yield engine, live


def _train(config: StageConfig, engine: Engine, live: LiveMemory, accept: Callable[[float, float], bool]) -> None:
    batch = replace(random_batch(config, seed=0), cu_seqlens=_documents(config))
    for _ in range(2):
        live.start_peak()
        engine.train_step(itertools.repeat(batch), accept)


def _as_on_cuda(engine: MegatronEngine) -> None:
    for part in engine._optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            group["fused"] = True


def _offloaded(engine: DeepSpeedEngine) -> int:
    if not engine.config.parallel.deepspeed.offload_optimizer:
        return 0
    zero = engine._zero
    found = [value for state in engine._adamw.state.values() for value in state.values()]
    found += engine._gradients_of
    if engine.config.parallel.deepspeed.zero_stage == 3:
        found += zero.fp32_partitioned_groups_flat
    else:
        found += [*zero.single_partition_of_fp32_groups, *zero.param_buffer_of_bit16_for_cpu_offload_groups]
    if engine.config.parallel.deepspeed.offload_parameters:
        found += [parameter.ds_tensor for parameter in engine.chunks[0].parameters()]
    storages = [tensor.untyped_storage() for tensor in found]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _documents(config: StageConfig) -> torch.Tensor:
    """As many as the estimate takes a sequence to have."""
    length = config.model.seq_length
    return torch.tensor([0, length // 4, 5 * length // 8, length], dtype=torch.int32)
