"""Compares a scan's outputs and gradients with a float64 run, per tensor and head, before it is timed."""

import math
from collections.abc import Callable, Iterable

import torch
from shapes import CHECKED, Shape, decay_class
from torch import Tensor

BOUND = 5e-3
"""relative error of bf16 inputs"""

Scan = Callable[..., Tensor]


def results(scan: Scan, inputs: dict[str, Tensor], dy: Tensor) -> dict[str, Tensor]:
    """y and the gradients d<input> of those inputs that take one."""
    leaves = {name: x.detach().requires_grad_(x.requires_grad) for name, x in inputs.items()}
    y = scan(*leaves.values())
    y.backward(dy.to(y))
    return {"y": y.detach()} | {f"d{name}": x.grad for name, x in leaves.items() if x.grad is not None}


def output_adjoint(inputs: dict[str, Tensor]) -> Tensor:
    """dy in v's shape and dtype: the same in the first CHECKED tokens for every length, zero behind."""
    v = inputs["v"]
    generator = torch.Generator(v.device).manual_seed(1)
    first = torch.randn(v[:, :CHECKED].shape, device=v.device, dtype=v.dtype, generator=generator)
    return torch.cat([first, first.new_zeros(v[:, CHECKED:].shape)], 1)


def reference_results(reference: Scan, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of the first CHECKED tokens in float64."""
    first = {
        name: (x if name == "prior" else x[:, :CHECKED]).detach().double().requires_grad_(x.requires_grad)
        for name, x in inputs.items()
    }
    return results(reference, first, output_adjoint(inputs)[:, :CHECKED])


def head_errors(actual: Tensor, expected: Tensor) -> list[float]:
    """Relative errors of [B, T, heads or groups, ...] by head, floor 1e-6 of the whole tensor's norm."""
    floor = 1e-6 * float(expected.norm())
    difference = (actual.double() - expected).transpose(0, 2).flatten(1).norm(dim=1)
    size = expected.transpose(0, 2).flatten(1).norm(dim=1)
    return (difference / size.clamp_min(floor)).tolist()


def class_errors(
    scan: Scan, expected: dict[str, Tensor], inputs: dict[str, Tensor], shape: Shape, kind: str
) -> dict[str, tuple[float, str]]:
    """Worst error and where it lies, by decay class; "shared" for q and k of groups of several heads.

    Tokens behind the first CHECKED take no adjoint; a NaN counts as infinite.
    """
    actual = results(scan, inputs, output_adjoint(inputs))
    worst: dict[str, tuple[float, str]] = {}
    for name, reference in expected.items():
        found = head_errors(actual[name][:, :CHECKED], reference)
        for head, error in enumerate(found):
            own = len(found) == shape.heads
            where = decay_class(kind, head) if own else "shared"
            size = error if error == error else math.inf
            if where not in worst or size > worst[where][0]:
                worst[where] = (size, f"{name} of {'head' if own else 'group'} {head}")
    return worst


def largest(errors: Iterable[tuple[float, str]]) -> float:
    return max(error for error, _ in errors)
