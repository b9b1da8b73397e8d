"""Interleaved 1F1B on two pipeline ranks of two uneven chunks each, against one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import training_runs
from helpers.stages import random_batch, tiny_stage
from helpers.training_runs import Run, unsplit
from helpers.workers import Workers

from megatron_palimpsa import parallel
from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.engine.megatron import MegatronEngine
from megatron_palimpsa.training.validation import Validation, validate

INTERLEAVED = {"pp": 2, "vpp": 2}
RELATIVE = 1e-5
GRADIENT_FLOOR = 1e-7


def stage(layout: dict[str, Any]) -> StageConfig:
    return tiny_stage(
        2 if layout else 1,
        model={"init_std": 0.2, "pattern": "M|P*|-|P"},
        # Four microbatches: two groups of the schedule.
        train={"global_batch_tokens": 128, "tokens": 12800},
        optimizer={"lr": 1e-3},
        parallel=layout,
    )


def validated(config: StageConfig) -> Validation:
    with training_runs.layout(config):
        return validate(MegatronEngine(config), [random_batch(config, seed) for seed in range(3)])


def test_equals_one_process(two_processes: Workers, one_process_run: Callable[[StageConfig, int], Run]) -> None:
    expected = one_process_run(stage({}), 6)
    runs: list[Run] = two_processes.run(training_runs.train, stage(INTERLEAVED), 6)
    for run in runs:
        assert run.steps == runs[0].steps
        for step, reference in zip(run.steps, expected.steps, strict=True):
            assert step.tokens == reference.tokens
            assert math.isclose(step.loss, reference.loss, rel_tol=RELATIVE)
            assert math.isclose(step.grad_norm, reference.grad_norm, rel_tol=RELATIVE)
        # Three batches, which the schedule can only take as four.
        torch.testing.assert_close(run.evaluation, expected.evaluation, rtol=1e-4, atol=1e-4)
        assert math.isclose(run.evaluation_loss, expected.evaluation_loss, rel_tol=RELATIVE)
    # Every layer is on one rank, under its name in the unsplit model.
    held = [{name.split(".")[2] for name in run.weights if "layers" in name} for run in runs]
    assert not held[0] & held[1]
    gradients = unsplit([run.gradients for run in runs], tp=1)
    assert gradients.keys() == expected.gradients.keys()
    for name, gradient in gradients.items():
        reference = expected.gradients[name].value
        error = (gradient - reference).abs().max()
        assert error <= RELATIVE * reference.abs().max() + GRADIENT_FLOOR, name
    weights = unsplit([run.weights for run in runs], tp=1)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected.weights[name].value, rtol=0, atol=2e-4, msg=name)


def test_validation_sees_every_layer(two_processes: Workers) -> None:
    try:
        expected = validated(stage({}))
    finally:
        parallel.destroy()
    for found in two_processes.run(validated, stage(INTERLEAVED)):
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        assert list(found.memory) == ["1", "2", "5"]
        for layer, statistics in expected.memory.items():
            assert found.memory[layer] == pytest.approx(statistics, rel=1e-4)
