import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from megatron_palimpsa.engine.grad_norm import total_grad_norm

CPU = torch.device("cpu")


def optimizer_with(*parts: list[torch.Tensor]) -> Any:
    """What `total_grad_norm` asks of a ChainedOptimizer."""
    group = parallel_state.get_model_parallel_group()
    return SimpleNamespace(
        chained_optimizers=[
            SimpleNamespace(get_grads_for_grad_norm=lambda part=part: part, get_grad_stats_parallel_group=lambda: group)
            for part in parts
        ]
    )


def shifted(gradient: torch.Tensor, elements: int) -> torch.Tensor:
    """The same values in a flat tensor that begins `elements` behind an aligned address."""
    buffer = torch.empty(gradient.numel() + elements)
    return buffer[elements:].copy_(gradient.flatten())


@pytest.mark.parametrize("seed", range(8))
def test_norm_is_the_exact_one_for_any_order_split_and_alignment(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = [
        torch.randn(shape, generator=generator) * 10.0**-power for power, shape in enumerate([(64, 33), (7,), (1000,)])
    ]
    squares = [value * value for gradient in gradients for value in gradient.flatten().tolist()]
    exact = torch.tensor(math.sqrt(math.fsum(squares)), dtype=torch.float64).float().item()
    assert total_grad_norm(optimizer_with(gradients), CPU) == exact
    assert total_grad_norm(optimizer_with(gradients[:1], gradients[1:]), CPU) == exact
    for offset in (1, 3, 8):
        moved = [shifted(gradient, offset) for gradient in reversed(gradients)]
        assert total_grad_norm(optimizer_with(moved), CPU) == exact
        pieces = [piece for gradient in moved for piece in gradient.split(100 + offset)]
        assert total_grad_norm(optimizer_with(pieces), CPU) == exact


def test_rank_without_gradients_adds_nothing() -> None:
    assert total_grad_norm(optimizer_with([]), CPU) == 0.0
    assert total_grad_norm(optimizer_with([], [torch.full((4,), 1.5)]), CPU) == 3.0


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_gradients_that_are_not_finite_show(value: float) -> None:
    assert not math.isfinite(total_grad_norm(optimizer_with([torch.ones(3), torch.tensor([1.0, value])]), CPU))
