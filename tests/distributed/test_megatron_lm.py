"""Megatron-LM's own loop on two ranks computes what this package's trainer computes on one."""

import math
from typing import Any

import pytest
from helpers import megatron_lm
from helpers.megatron_lm import trainers_steps
from helpers.stages import tiny_stage
from helpers.workers import Workers

from megatron_palimpsa.config import StageConfig

STEPS = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor and sequence parallel": {"tp": 2, "sequence_parallel": True},
    "tensor parallel": {"tp": 2, "distributed_optimizer": False},
    "pipeline": {"pp": 2},
    "interleaved pipeline": {"pp": 2, "vpp": 2},
    "data parallel": {},
}


def stage(precision: str, world_size: int, parallel: dict[str, Any]) -> StageConfig:
    return tiny_stage(
        world_size,
        model={"init_std": 0.2, "pattern": "MP|*|-|P" if "vpp" in parallel else "MP*|-P"},
        train={"global_batch_tokens": 128, "tokens": 128 * STEPS, "precision": precision},
        optimizer={"lr": 1e-3, "schedule": "constant", "warmup_steps": 0},
        parallel=parallel,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_the_trainers_on_one_rank(layout: str, two_processes: Workers) -> None:
    compare("fp32", LAYOUTS[layout], two_processes, tolerance=1e-5)


def test_fp32_residual_goes_through_a_bf16_pipeline(two_processes: Workers) -> None:
    compare("bf16", {"pp": 2}, two_processes, tolerance=1e-2)


def compare(precision: str, layout: dict[str, Any], workers: Workers, tolerance: float) -> None:
    expected = trainers_steps(stage(precision, 1, {}))
    for rank, (losses, norms) in enumerate(workers.run(megatron_lm.losses_and_norms, stage(precision, 2, layout))):
        assert len(norms) == STEPS
        for loss, norm, step in zip(losses, norms, expected, strict=True):
            # Only the last pipeline stage knows losses.
            assert math.isclose(loss, step.loss, rel_tol=tolerance) or (rank == 0 and "pp" in layout)
            assert math.isclose(norm, step.grad_norm, rel_tol=tolerance)
