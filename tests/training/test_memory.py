"""The memory estimate against the tensors of a real training step, and against what it says of itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.stages import tiny_stage
from helpers.step_memory import measured, measured_zero, stage

from megatron_palimpsa import parallel
from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.training import memory
from megatron_palimpsa.training.memory import MemoryEstimate, estimate_memory

LARGE_VOCABULARY = {"pattern": "MM", "vocab_size": 4000, "seq_length": 256}
CASES: dict[str, dict[str, Any]] = {
    "M and P": {},
    "two groups": {"model": {"pattern": "MP", "ngroups": 2}},
    "every kind of layer": {"model": {"pattern": "M*-M"}},
    "own keys": {"model": {"pattern": "QLQ"}},
    "own keys, fp32": {"model": {"pattern": "LQ"}, "train": {"precision": "fp32"}},
    "own keys, selective": {"model": {"pattern": "QL"}, "train": {"recompute": "selective"}},
    "fp32": {"model": {"pattern": "MP"}, "train": {"precision": "fp32"}},
    "rotary": {"model": {"pattern": "*-", "rope_theta": 10000.0}, "train": {"recompute": "selective"}},
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


ZERO: dict[str, Any] = {"reduce_bucket_size": 100_000}
ZERO_CASES: dict[str, tuple[Any, ...]] = {
    "stage 0": (ZERO | {"zero_stage": 0}, "bf16"),
    "stage 1": (ZERO | {"zero_stage": 1}, "bf16"),
    "stage 2": (ZERO | {"zero_stage": 2}, "bf16"),
    "stage 3": (ZERO | {"zero_stage": 3, "stage3_param_persistence_threshold": 1000}, "bf16"),
    "stage 2, fp32": (ZERO | {"zero_stage": 2}, "fp32"),
    "stage 3, fp32": (ZERO | {"zero_stage": 3}, "fp32"),
    # Where no gradients of earlier microbatches are there, and in stage 2 none before the bucket is full.
    "stage 1, one microbatch": (ZERO | {"zero_stage": 1}, "bf16", 1),
    "stage 2, one microbatch": ({"reduce_bucket_size": 1_000_000, "zero_stage": 2}, "bf16", 1),
}
OFFLOAD = {"offload_optimizer": True}
OFFLOAD_CASES: dict[str, dict[str, Any]] = {
    "stage 1": ZERO | OFFLOAD | {"zero_stage": 1},
    "stage 2": ZERO | OFFLOAD | {"zero_stage": 2},
    "stage 3": ZERO | OFFLOAD | {"zero_stage": 3},
    # Nothing gathered ahead, so that nothing of it counts as held.
    "stage 3, all": ZERO | OFFLOAD | {"zero_stage": 3, "offload_parameters": True, "stage3_max_live_parameters": 0},
}


def of_zero(settings: dict[str, Any], precision: str = "bf16", microbatches: int = 2) -> StageConfig:
    pytest.importorskip("deepspeed")
    # As many parameters as activations, or neither would be seen.
    model = {"hidden_size": 256, "seq_length": 256}
    train = {"precision": precision, "global_batch_tokens": microbatches * 256}
    return stage({"model": model, "train": train, "parallel": {"engine": "deepspeed", "deepspeed": settings}})


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts without a GPU what would be there")
@pytest.mark.parametrize("case", ZERO_CASES)
def test_the_estimate_is_what_a_step_under_zero_holds(monkeypatch, case):
    monkeypatch.setattr(memory, "WORKSPACE_BYTES", 0)
    config = of_zero(*ZERO_CASES[case])
    try:
        peak, _, _ = measured_zero(config)
    finally:
        parallel.destroy()
    assert estimate_memory(config, 1).total == pytest.approx(peak, rel=0.03)


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts without a GPU what would be there")
@pytest.mark.parametrize("case", OFFLOAD_CASES)
def test_what_is_offloaded_is_in_host_memory_and_nothing_else(case):
    config = of_zero(OFFLOAD_CASES[case])
    try:
        _, gpu, host = measured_zero(config)
    finally:
        parallel.destroy()
    estimate = estimate_memory(config, 1)
    assert estimate.host == pytest.approx(host, rel=0.02)
    # Before Adam's step, when the activations are gone.
    assert gpu == pytest.approx(estimate.weights + estimate.gradients + estimate.buffers, rel=0.04)


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


def of_zero_2_7b(world_size: int = 1, **settings: Any) -> MemoryEstimate:
    return of_2_7b(world_size, engine="deepspeed", deepspeed=settings)


def test_zero_spreads_one_thing_more_a_stage():
    parameters = 2_702_599_680
    nothing, one, two, three = (of_zero_2_7b(4, zero_stage=stage) for stage in range(4))
    assert (nothing.weights, nothing.gradients, nothing.optimizer) == (2 * parameters, 4 * parameters, 12 * parameters)
    assert (one.weights, one.gradients, one.optimizer * 4) == (2 * parameters, 4 * parameters, 12 * parameters)
    assert (two.weights, two.gradients * 4, two.optimizer) == (2 * parameters, 4 * parameters, one.optimizer)
    assert (three.weights * 4, three.gradients, three.optimizer) == (2 * parameters, two.gradients, one.optimizer)
    # Weights gathered in bf16, beside the bucket in float32.
    assert three.buffers == 2 * 1_000_000_000 + 4 * 500_000_000
    assert nothing.total > one.total > two.total > three.total
    assert nothing.host == 0


def test_offload_takes_the_optimizer_off_the_gpu_and_then_the_weights():
    parameters = 2_702_599_680
    optimizer = of_zero_2_7b(2, zero_stage=3, offload_optimizer=True)
    everything = of_zero_2_7b(2, zero_stage=3, offload_optimizer=True, offload_parameters=True)
    assert (optimizer.weights, optimizer.gradients, optimizer.optimizer) == (parameters, 0, 0)
    assert (everything.weights, everything.host - optimizer.host) == (0, parameters)
    assert optimizer.host == 8 * parameters
