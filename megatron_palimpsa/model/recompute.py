"""Activations that cost memory and little time to form again are dropped between forward and backward pass.

A layer calls `droppable` for such a step. Where a later operation wants to keep the result for its backward pass,
autograd then keeps the step and its inputs instead, which other operations keep anyway, and the step runs again when
the backward pass comes there. No other operation runs twice, and the gradients are the same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

_steps: dict[int, tuple[StorageWeakRef, _Step]] | None = None
"""The steps of the forward pass under way by the storage of their results. The references keep a storage's address,
but not its memory, from being used again."""


class _Step:
    """How a result is formed; the result itself, once the backward pass has asked for it."""

    def __init__(self, function: Callable[..., Tensor], inputs: tuple[Any, ...]) -> None:
        self._function = function
        self._inputs = tuple(_keep(value) for value in inputs)
        self._result: Tensor | None = None

    def result(self) -> Tensor:
        if self._result is None:
            with torch.no_grad():
                self._result = self._function(*(_restore(kept) for kept in self._inputs))
            self._inputs = ()
        return self._result


@dataclass(frozen=True)
class _Dropped:
    """A view into the result of a step."""

    step: _Step
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


def _keep(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    known = _steps.get(value.untyped_storage()._cdata) if _steps is not None else None
    if known is not None:
        return _Dropped(known[1], value.size(), value.stride(), value.storage_offset())
    # With its graph, a tensor kept in the graph would never be freed.
    return value if value.is_leaf else value.detach()


def _restore(kept: Any) -> Any:
    if isinstance(kept, _Dropped):
        return kept.step.result().as_strided(kept.size, kept.stride, kept.offset)
    return kept


@contextlib.contextmanager
def dropping() -> Iterator[None]:
    """Within it results of `droppable` steps are not kept for the backward pass."""
    global _steps
    _steps = {}
    try:
        with saved_tensors_hooks(_keep, _restore):
            yield
    finally:
        _steps = None


def droppable(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """`function(*inputs)`, a step that may run again in the backward pass.

    Args:
        function: of its arguments alone, with a new and contiguous result; collectives in it run again on all ranks
            of their group in the same order.
        inputs: tensors, which other operations should keep for the backward pass or which are themselves
            droppable, parameters, and anything else.
    """
    result = function(*inputs)
    if _steps is not None and torch.is_grad_enabled():
        storage = result.untyped_storage()
        _steps[storage._cdata] = (StorageWeakRef(storage), _Step(function, inputs))
    return result
