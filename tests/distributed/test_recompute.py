"""Recomputation under tensor and context parallelism: what runs again communicates again."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import training_runs
from helpers.stages import tiny_stage
from helpers.training_runs import Run
from helpers.workers import Workers

from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.model import loss

LAYOUTS: list[dict[str, Any]] = [{"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}]


def stage(recompute: str, layout: dict[str, Any]) -> StageConfig:
    return tiny_stage(
        2,
        # The gated norm's one group lies on both ranks.
        model={"ngroups": 2, "norm_groups": 1},
        train={"recompute": recompute},
        parallel={**layout, "distributed_optimizer": False},
    )


def with_few_logits(config: StageConfig, steps: int) -> Run:
    loss.TOKENS, whole = 7, loss.TOKENS
    try:
        return training_runs.train(config, steps)
    finally:
        loss.TOKENS = whole


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_are_those_of_keeping_everything(layout: dict[str, Any], two_processes: Workers) -> None:
    kept: list[Run] = two_processes.run(training_runs.train, stage("none", layout), 2)
    for recompute in ("selective", "full"):
        runs: list[Run] = two_processes.run(training_runs.train, stage(recompute, layout), 2)
        for run, expected in zip(runs, kept, strict=True):
            assert run.steps == expected.steps
            for name, share in run.gradients.items():
                assert torch.equal(share.value, expected.gradients[name].value), name
    for run in two_processes.run(with_few_logits, stage("selective", layout), 2):
        for step, expected_step in zip(run.steps, kept[0].steps, strict=True):
            assert math.isclose(step.loss, expected_step.loss, rel_tol=1e-6)
            assert math.isclose(step.grad_norm, expected_step.grad_norm, rel_tol=1e-5)
