"""The memory estimate against the tensors of a real training step, and against what it says of itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.stages import tiny_stage
from helpers.step_memory import measured, stage

from megatron_palimpsa import parallel
from megatron_palimpsa.training import memory
from megatron_palimpsa.training.memory import MemoryEstimate, estimate_memory

LARGE_VOCABULARY = {"pattern": "MM", "vocab_size": 4000, "seq_length": 256}
CASES: dict[str, dict[str, Any]] = {
    "M and P": {},
    "two groups": {"model": {"pattern": "MP", "ngroups": 2}},
    "every kind of layer": {"model": {"pattern": "M*-M"}},
    "fp32": {"model": {"pattern": "MP"}, "train": {"precision": "fp32"}},
    "bf16 residual stream": {"model": {"pattern": "MMM", "fp32_residual": False}},
    "selective": {"train": {"recompute": "selective"}},
    "full": {"train": {"recompute": "full"}},
    "logits": {"model": LARGE_VOCABULARY | {"tie_embeddings": False}},
    "logits, selective": {"model": LARGE_VOCABULARY, "train": {"recompute": "selective"}},
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts without a GPU what would be there")
@pytest.mark.parametrize("case", CASES)
def test_the_estimate_is_what_a_step_holds(monkeypatch, case):
    monkeypatch.setattr(memory, "WORKSPACE_BYTES", 0)
    config = stage(CASES[case])
    try:
        between_steps, peak = measured(config)
    finally:
        parallel.destroy()
    estimate = estimate_memory(config, 1)
    assert estimate.total - estimate.activations == pytest.approx(between_steps, rel=0.02)
    assert estimate.total == pytest.approx(peak, rel=0.03)


MAMBA2_2_7B = {
    "pattern": "M" * 64,
    "hidden_size": 2560,
    "vocab_size": 50277,
    "seq_length": 4096,
    "d_state": 128,
    "headdim": 64,
    "num_attention_heads": None,
    "num_query_groups": None,
    "ffn_hidden_size": None,
}


def of_2_7b(world_size: int = 1, model: dict[str, Any] | None = None, **parallel_settings: Any) -> MemoryEstimate:
    train = {"global_batch_tokens": 2**18, "tokens": 2**26, "precision": "bf16"}
    config = tiny_stage(world_size, model=MAMBA2_2_7B | (model or {}), train=train, parallel=parallel_settings)
    return estimate_memory(config, world_size // config.parallel.replica_size)


def test_memory_is_shared_over_the_layout():
    parameters = 2_702_599_680
    alone = of_2_7b()
    assert (alone.weights, alone.gradients, alone.optimizer) == (2 * parameters, 4 * parameters, 12 * parameters)
    spread = of_2_7b(4)
    assert (spread.weights, spread.optimizer * 4) == (alone.weights, alone.optimizer)
    replicated = of_2_7b(4, distributed_optimizer=False)
    assert replicated.optimizer == alone.optimizer
    tensors = of_2_7b(2, tp=2)
    # B and C are held by both ranks, and so are what goes into the projections and the residual stream.
    assert 0.5 * alone.weights < tensors.weights < 0.51 * alone.weights
    assert 0.5 * alone.activations < tensors.activations < 0.6 * alone.activations
    context = of_2_7b(2, cp=2)
    assert (context.weights, context.optimizer * 2) == (alone.weights, alone.optimizer)
    assert 0.5 * alone.activations < context.activations < 0.52 * alone.activations


def test_the_pipeline_keeps_several_microbatches_in_flight():
    alone, staged = of_2_7b(), of_2_7b(2, pp=2)
    # Of the first rank: half of the layers and two microbatches, embedding and all.
    assert 0.5 * alone.weights < staged.weights < 0.55 * alone.weights
    assert 0.9 * alone.activations < staged.activations < 1.1 * alone.activations
    interleaved = of_2_7b(2, pp=2, vpp=2)
    assert 1.2 * staged.activations < interleaved.activations < 1.35 * staged.activations
    # One microbatch a step cannot be two.
    single = of_2_7b(2, {"seq_length": 2**18}, pp=2)
    alone = of_2_7b(1, {"seq_length": 2**18})
    assert 0.45 * alone.activations < single.activations < 0.6 * alone.activations
