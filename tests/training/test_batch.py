"""A rank's part of a row, against each token's document."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from helpers.context_ranks import ROWS, TOKENS, row


def documents(cu_seqlens: torch.Tensor, tokens: int) -> list[int | None]:
    """Each token's document, None behind the last."""
    numbers: list[int | None] = [None] * tokens
    for number, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        numbers[start:end] = [number] * (end - start)
    return numbers


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_parts_say_how_documents_go_on(name: str, size: int) -> None:
    whole = row(ROWS[name])
    of_row, length = documents(whole.cu_seqlens, TOKENS), TOKENS // size
    parts = [whole.of_rank(rank, size) for rank in range(size)]
    for field in ("tokens", "labels", "loss_mask"):
        assert torch.equal(torch.cat([getattr(batch, field) for batch in parts], 1), getattr(whole, field))
    crossed = any(of_row[border] is not None and of_row[border - 1] == of_row[border]
                  for border in range(length, TOKENS, length))  # fmt: skip
    for rank, batch in enumerate(parts):
        part, start = batch.part, rank * length
        expected = of_row[start : start + length]
        local = documents(batch.cu_seqlens, length)
        assert part.start == start
        assert part.crossed is crossed
        # The same tokens are in one document, the same are padding.
        assert [number is None for number in local] == [number is None for number in expected]
        for a, b in pairwise(range(length)):
            assert (local[a] == local[b]) == (expected[a] == expected[b])
        first, last = expected[0], expected[-1]
        assert part.first_start == (start if first is None else of_row.index(first))
        assert part.first_end == (0 if first is None else expected.count(first))
        goes_on_behind = last is not None and start + length < TOKENS and of_row[start + length] == last
        assert part.open_from == (expected.index(last) if goes_on_behind else None)
        assert part.goes_on == (first is not None and of_row.index(first) < start)
        assert part.is_inside == (part.goes_on and goes_on_behind and first == last)


def test_one_rank_takes_the_row_itself() -> None:
    whole = row(ROWS["one document"])
    assert whole.of_rank(0, 1) is whole
    assert whole.part is None
