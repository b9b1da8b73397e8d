"""Parts of unsplit tensors: what a rank writes to a checkpoint or reads from one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A rectangular part of an unsplit tensor."""

    key: str
    """The tensor's name in the unsplit model."""
    whole: Shape
    """Its shape there."""
    offset: Shape
    """First index of the part."""
    shape: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


ReadBox = Callable[[Box, Tensor], None]
"""Fills a tensor of the box's shape with that part of a stored tensor."""


def boxes_of_range(shape: Shape, start: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    """(offset, shape) of boxes that hold the elements `start` to `end` of a contiguous tensor, in their order.

    At most two boxes a dimension, and one of whole rows between them; none is empty.
    """
    if start >= end:
        return
    if not shape:
        yield (), ()
        return
    if len(shape) == 1:
        yield (start,), (end - start,)
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), end // inner
    if first > last:
        yield from _within_row(shape, last, start, end)
        return
    yield from _within_row(shape, first - 1, start, first * inner)
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _within_row(shape, last, last * inner, end)


def _within_row(shape: Shape, row: int, start: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    before = row * math.prod(shape[1:])
    for offset, size in boxes_of_range(shape[1:], start - before, end - before):
        yield (row, *offset), (1, *size)
