"""A small stage with the tiles of a large one, and the memory that a step of it takes on a GPU."""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace
from typing import Any

import torch

from helpers.live_memory import LiveMemory, as_on_a_gpu
from helpers.stages import tiny_stage
from megatron_palimpsa import parallel
from megatron_palimpsa.bench.batches import random_batch
from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.engine.megatron import MegatronEngine

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
    with as_on_a_gpu(), LiveMemory() as live:
        parallel.initialize(config.parallel, config.seed)
        engine = MegatronEngine(config)
        for part in engine._optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                group["fused"] = True
        batch = replace(random_batch(config, seed=0), cu_seqlens=_documents(config))
        for _ in range(2):
            live.start_peak()
            engine.train_step(itertools.repeat(batch), lambda loss, grad_norm: True)
        gc.collect()
        return live.live, live.peak


def _documents(config: StageConfig) -> torch.Tensor:
    """As many as the estimate takes a sequence to have."""
    length = config.model.seq_length
    return torch.tensor([0, length // 4, 5 * length // 8, length], dtype=torch.int32)
