"""Boxes that hold a stretch of a tensor's elements."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_palimpsa.engine.boxes import boxes_of_range

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(shapes, st.data())
def test_boxes_hold_the_stretch_in_its_order(shape, data):
    tensor = torch.arange(math.prod(shape)).view(shape)
    start = data.draw(st.integers(0, tensor.numel()))
    end = data.draw(st.integers(start, tensor.numel()))
    boxes = list(boxes_of_range(shape, start, end))
    parts = [
        tensor[tuple(slice(first, first + size) for first, size in zip(offset, size, strict=True))].reshape(-1)
        for offset, size in boxes
    ]
    assert torch.cat([torch.empty(0, dtype=torch.int64), *parts]).tolist() == list(range(start, end))
    assert all(part.numel() for part in parts)
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


@pytest.mark.parametrize(
    ("start", "end", "boxes"),
    [
        (0, 12, [((0, 0), (3, 4))]),
        (5, 7, [((1, 1), (1, 2))]),
        (3, 9, [((0, 3), (1, 1)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]),
        (4, 4, []),
    ],
)
def test_boxes_of_a_matrix(start, end, boxes):
    assert list(boxes_of_range((3, 4), start, end)) == boxes
