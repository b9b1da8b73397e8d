"""The step over all parameters at once against Megatron's own, parameter by parameter: the same bits."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import pytest
import torch
from helpers.stages import random_batch, tiny_stage
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.engine import megatron
from megatron_palimpsa.engine.megatron import MegatronEngine


def trained(config: StageConfig) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = MegatronEngine(config)
    batches = repeat(random_batch(config, 0))
    norms = [engine.train_step(batches, lambda loss, norm: True).grad_norm for _ in range(4)]
    weights = {name: value.detach().clone() for name, value in engine.chunks[0].named_parameters()}
    return norms, weights


def clip_one_by_one(optimizer: Any, largest: float, norm: float) -> None:
    clip_grad_by_total_norm_fp32(optimizer.get_parameters(), largest, norm)


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_equals_megatrons_loops(precision: str, distributed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_stage(
        model={"init_std": 0.2},
        train={"precision": precision},
        # Every step is clipped.
        optimizer={"lr": 1e-2, "warmup_steps": 1, "clip_grad": 1e-3},
        parallel={"distributed_optimizer": distributed},
    )
    norms, weights = trained(config)
    monkeypatch.setattr(megatron, "step_at_once", lambda optimizer: None)
    monkeypatch.setattr(megatron, "clip", clip_one_by_one)
    assert min(norms) > 1e-3
    expected_norms, expected = trained(config)
    assert norms == expected_norms
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name]), name
