"""Every layout computes the same function as one process: a table of configurations on two processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers import training_runs
from helpers.stages import tiny_stage
from helpers.training_runs import Run, unsplit
from helpers.workers import Workers

from megatron_palimpsa.config import StageConfig

STEPS = 6
RELATIVE = 1e-5
GRADIENT_FLOOR = 1e-7
"""Absolute, beside gradients of about 1e-2: fp32 sums in another order."""


@dataclass(frozen=True)
class Case:
    name: str
    parallel: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    compare_gradients: bool = True

    def stage(self, parallel: bool) -> StageConfig:
        train = {"global_batch_tokens": 128, "tokens": 25600, **self.train}
        layout = self.parallel if parallel else {"distributed_optimizer": False}
        # Large weights and a small rate: Adam turns the rounding of a gradient near 0 into a step of the full rate.
        return tiny_stage(
            2 if parallel else 1,
            model={"init_std": 0.2, **self.model},
            train=train,
            parallel=layout,
            optimizer={"lr": 1e-3},
        )


PLAIN = {"distributed_optimizer": False}
CASES = [
    Case("tp2", {"tp": 2, **PLAIN}),
    Case("tp2-sequence-parallel", {"tp": 2, "sequence_parallel": True, **PLAIN}),
    Case("tp2-two-groups", {"tp": 2, **PLAIN}, {"ngroups": 2}),
    Case("tp2-sequence-parallel-two-groups-untied", {"tp": 2, "sequence_parallel": True},
         {"ngroups": 2, "tie_embeddings": False}),
    Case("tp2-recompute", {"tp": 2, "sequence_parallel": True, **PLAIN}, train={"recompute": "full"}),
    Case("pp2-even-untied", {"pp": 2, **PLAIN}, {"pattern": "MP*-PM", "tie_embeddings": False}),
    Case("pp2-even-tied", {"pp": 2}, {"pattern": "MP*-PM"}),
    Case("pp2-uneven-tied", {"pp": 2, **PLAIN}, {"pattern": "MP*|-P"}),
    Case("dp2", {"distributed_optimizer": False}),
    Case("dp2-distributed-optimizer", {"distributed_optimizer": True}, compare_gradients=False),
    Case("dp2-distributed-optimizer-two-groups", {"distributed_optimizer": True}, {"ngroups": 2},
         {"micro_batch_size": 2, "global_batch_tokens": 256}, compare_gradients=False),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layout_computes_what_one_process_does(
    case: Case, two_processes: Workers, one_process_run: Callable[[StageConfig, int], Run]
) -> None:
    expected = one_process_run(case.stage(parallel=False), STEPS)
    runs: list[Run] = two_processes.run(training_runs.train, case.stage(parallel=True), STEPS)

    for run in runs:
        assert run.steps == runs[0].steps
        assert run.learning_rates == expected.learning_rates
        for step, reference in zip(run.steps, expected.steps, strict=True):
            assert step.tokens == reference.tokens
            assert math.isclose(step.loss, reference.loss, rel_tol=RELATIVE)
            assert math.isclose(step.grad_norm, reference.grad_norm, rel_tol=RELATIVE)
        torch.testing.assert_close(run.evaluation, expected.evaluation, rtol=1e-4, atol=1e-4)
        assert math.isclose(run.evaluation_loss, expected.evaluation_loss, rel_tol=RELATIVE)

    tp = case.parallel.get("tp", 1)
    if case.compare_gradients:
        gradients = unsplit([run.gradients for run in runs], tp)
        assert gradients.keys() == expected.gradients.keys()
        for name, gradient in gradients.items():
            reference = expected.gradients[name].value
            error = (gradient - reference).abs().max()
            assert error <= RELATIVE * reference.abs().max() + GRADIENT_FLOOR, name
    # Bitwise equality of replicated copies is asserted while putting the shares together.
    weights = unsplit([run.weights for run in runs], tp)
    assert weights.keys() == expected.weights.keys()
    for name, weight in weights.items():
        # A fifth of what one step moves a weight.
        torch.testing.assert_close(weight, expected.weights[name].value, rtol=0, atol=2e-4, msg=name)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_copies_are_equal_after_twenty_steps(sequence_parallel: bool, two_processes: Workers) -> None:
    """Copies whose gradients differ drift apart under Adam; a rate at which weights move far shows it."""
    config = tiny_stage(
        2,
        train={"global_batch_tokens": 64, "tokens": 64 * 100},
        parallel={"tp": 2, "sequence_parallel": sequence_parallel},
        optimizer={"lr": 1e-2},
    )
    runs: list[Run] = two_processes.run(training_runs.train, config, 20)
    copied = {name for name, share in runs[0].weights.items() if share.split_dim is None}
    kinds = (
        "mixer.B_weight",
        "mixer.conv_C_bias",
        "mixer.beta_down_weight",
        "layers.0.norm.weight",
        "final_norm.weight",
    )
    assert all(any(name.endswith(kind) for name in copied) for kind in kinds)
    unsplit([run.weights for run in runs], tp=2)
    assert [step.applied for step in runs[0].steps] == [True] * 20
