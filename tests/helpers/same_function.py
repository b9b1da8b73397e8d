"""Whether a layout computes what one process does, within stated bounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from helpers.training_runs import Run, unsplit

GRADIENT_FLOOR = 1e-10
"""Absolute error of a gradient's element that does not count: a hundred-thousandth of the smallest gradient."""


@dataclass(frozen=True)
class Deviations:
    """How far a layout is from one process, at most; or how far it may be."""

    loss: float
    """Relative, of the steps' losses and of the evaluation's mean."""
    grad_norm: float
    """Relative."""
    gradient: float
    """Of the elements of a parameter's first gradient, less the floor, beside the largest of them."""
    weight: float
    """Absolute, of the weights after the steps."""
    token_loss: float
    """Absolute, of single tokens' losses after the steps."""


FP32 = Deviations(loss=1e-5, grad_norm=1e-5, gradient=1e-5, weight=2e-4, token_loss=1e-4)
"""Sums in another order; seen are up to 4e-6 in gradients. Weights may differ by a fifth of what one step at a rate of
1e-3 moves them: Adam divides a gradient near 0 by itself."""


BF16_GPU = Deviations(loss=2e-3, grad_norm=5e-3, gradient=1e-1, weight=1.6e-2, token_loss=2e-1)
"""On the CPU 2e-4, 5e-4, 3e-2, one bit of a bf16 weight near 1 (8e-3) and 4e-2 were seen. A gradient that is not
summed, or twice, is wrong by half of itself or more."""


def assert_same_function(runs: list[Run], expected: Run, tp: int, bounds: Deviations) -> None:
    """Compare all ranks' runs with that of one process; copies of a parameter have to be equal to the bit."""
    for run in runs:
        assert run.steps == runs[0].steps, "ranks report different steps"
        assert run.evaluation.equal(runs[0].evaluation), "ranks evaluate differently"
        assert run.learning_rates == expected.learning_rates
        tokens = [step.tokens for step in run.steps]
        assert tokens == [step.tokens for step in expected.steps], f"{tokens} tokens with a loss"
        assert (run.parameters, run.flops_per_token) == (expected.parameters, expected.flops_per_token)
    gradients = unsplit([run.gradients for run in runs], tp)
    weights = unsplit([run.weights for run in runs], tp)
    assert gradients.keys() == expected.gradients.keys()
    assert weights.keys() == expected.weights.keys()
    errors = {}
    for name, gradient in gradients.items():
        reference = expected.gradients[name].value
        largest = reference.abs().max().item()
        # Or the floor would hide a wrong gradient.
        assert largest > 1e5 * GRADIENT_FLOOR, f"{name}: gradient of {largest} at most"
        error = (gradient - reference).abs().max().item()
        errors[name] = max(error - GRADIENT_FLOOR, 0.0) / largest
    seen = Deviations(
        loss=_relative(_losses(runs[0]), _losses(expected)),
        grad_norm=_relative(_norms(runs[0]), _norms(expected)),
        gradient=max(errors.values(), default=0.0),
        weight=max((weight - expected.weights[name].value).abs().max().item() for name, weight in weights.items()),
        token_loss=(runs[0].evaluation - expected.evaluation).abs().max().item(),
    )
    # pytest shows it with -s.
    print(" ".join(f"{kind} {value:.1e}" for kind, value in vars(seen).items()))
    wrong = [f"gradient of {name}: {error:.1e}" for name, error in errors.items() if not error <= bounds.gradient]
    for kind, bound in vars(bounds).items():
        if not getattr(seen, kind) <= bound:
            wrong.append(f"{kind}: {getattr(seen, kind):.1e}, {bound:.1e} allowed")
    assert not wrong, "; ".join(wrong)


def _losses(run: Run) -> list[float]:
    return [*(step.loss for step in run.steps), run.evaluation_loss]


def _norms(run: Run) -> list[float]:
    return [step.grad_norm for step in run.steps]


def _relative(values: list[float], wanted: list[float]) -> float:
    """The largest relative difference; nan where there is one."""
    return (
        (torch.tensor(values, dtype=torch.float64) / torch.tensor(wanted, dtype=torch.float64) - 1).abs().max().item()
    )
