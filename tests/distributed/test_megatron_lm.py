"""Megatron-LM's own loop on two ranks computes what this package's trainer computes on one."""

import math
from typing import Any

import pytest
from helpers import megatron_lm
from helpers.megatron_lm import trainers_steps
from helpers.stages import tiny_stage
from helpers.workers import Workers

STEPS = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor and sequence parallel": {"tp": 2, "sequence_parallel": True},
    "tensor parallel": {"tp": 2, "distributed_optimizer": False},
    "pipeline": {"pp": 2},
    "data parallel": {},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_the_trainers_on_one_rank(layout: str, two_processes: Workers) -> None:
    def stage(world_size: int, parallel: dict[str, Any]) -> Any:
        return tiny_stage(
            world_size,
            model={"init_std": 0.2, "pattern": "MP*|-P"},
            train={"global_batch_tokens": 128, "tokens": 128 * STEPS},
            optimizer={"lr": 1e-3, "schedule": "constant", "warmup_steps": 0},
            parallel=parallel,
        )

    expected = trainers_steps(stage(1, {}))
    for losses, grad_norms in two_processes.run(megatron_lm.losses_and_norms, stage(2, LAYOUTS[layout])):
        for loss, norm, step in zip(losses, grad_norms, expected, strict=True):
            # Only the last pipeline stage knows losses.
            assert math.isclose(loss, step.loss, rel_tol=1e-5) or (layout == "pipeline" and math.isnan(loss))
            assert math.isclose(norm, step.grad_norm, rel_tol=1e-5)
