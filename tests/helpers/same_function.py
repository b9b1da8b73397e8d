"""Whether a layout computes what one process does, within stated bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from helpers.training_runs import Run, unsplit


@dataclass(frozen=True)
class Bounds:
    """How far a layout may be from one process."""

    scalar: float
    """Relative, of losses and gradient norms."""
    gradient: float
    """Of a parameter's gradient, beside its largest element."""
    gradient_floor: float
    """Absolute, of a gradient's elements, added to it."""
    weight: float
    """Absolute, of the weights after the steps."""
    token_loss: float
    """Absolute, of single tokens' losses after the steps."""


FP32 = Bounds(scalar=1e-5, gradient=1e-5, gradient_floor=1e-10, weight=2e-4, token_loss=1e-4)
"""fp32 sums in another order, observed to 4e-6. The floor is a hundred-thousandth of the smallest gradient. Weights may
differ by a fifth of what one step at a rate of 1e-3 moves them: Adam divides a gradient near 0 by itself."""


def assert_same_function(runs: list[Run], expected: Run, tp: int, bounds: Bounds) -> None:
    """Compare all ranks' runs with that of one process; copies of a parameter have to be equal to the bit."""
    for run in runs:
        _assert_same_scalars(run, runs[0], expected, bounds)
    gradients = unsplit([run.gradients for run in runs], tp)
    assert gradients.keys() == expected.gradients.keys()
    for name, gradient in gradients.items():
        reference = expected.gradients[name].value
        error = (gradient - reference).abs().max().item()
        largest = reference.abs().max().item()
        # Or the floor would hide a wrong gradient.
        assert largest > 1e5 * bounds.gradient_floor, f"{name}: gradient of {largest} at most"
        assert error <= bounds.gradient * largest + bounds.gradient_floor, f"{name}: {error} beside {largest}"
    weights = unsplit([run.weights for run in runs], tp)
    assert weights.keys() == expected.weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected.weights[name].value, rtol=0, atol=bounds.weight, msg=name)


def _assert_same_scalars(run: Run, first: Run, expected: Run, bounds: Bounds) -> None:
    assert run.steps == first.steps
    assert run.learning_rates == expected.learning_rates
    assert (run.parameters, run.flops_per_token) == (expected.parameters, expected.flops_per_token)
    for number, (step, reference) in enumerate(zip(run.steps, expected.steps, strict=True), start=1):
        assert step.tokens == reference.tokens
        for value, wanted in ((step.loss, reference.loss), (step.grad_norm, reference.grad_norm)):
            assert math.isclose(value, wanted, rel_tol=bounds.scalar), f"step {number}: {value}, not {wanted}"
    torch.testing.assert_close(run.evaluation, expected.evaluation, rtol=0, atol=bounds.token_loss)
    assert math.isclose(run.evaluation_loss, expected.evaluation_loss, rel_tol=bounds.scalar)
