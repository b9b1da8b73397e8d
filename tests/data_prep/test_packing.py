"""Packings: every token once an epoch, documents kept whole where they fit, any position at any time."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from palimpsa_data.packing import BestFitPacking, ConcatPacking, Packing, best_fit_decreasing, shuffled

LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=60).map(lambda lengths: np.array(lengths, np.int64))
SEQ = 16


def tokens_of(packing: Packing, sequences: range) -> list[tuple[int, int]]:
    """(document, position) of each token."""
    return [
        (segment.document, segment.start + i)
        for index in sequences
        for segment in packing.segments(index)
        for i in range(segment.length)
    ]


def every_token(lengths: np.ndarray) -> Counter[tuple[int, int]]:
    return Counter((document, i) for document, length in enumerate(lengths) for i in range(length))


@given(LENGTHS, st.integers(0, 3))
def test_best_fit_uses_each_token_once_an_epoch(lengths: np.ndarray, epoch: int) -> None:
    packing = BestFitPacking(lengths, SEQ, (1, 0))
    sequences = range(epoch * packing.sequences, (epoch + 1) * packing.sequences)
    assert Counter(tokens_of(packing, sequences)) == every_token(lengths)


@given(LENGTHS)
def test_best_fit_keeps_documents_whole_where_they_fit(lengths: np.ndarray) -> None:
    packing = BestFitPacking(lengths, SEQ, (1, 0))
    parts: Counter[int] = Counter()
    for index in range(packing.sequences):
        segments = packing.segments(index)
        assert 0 < sum(segment.length for segment in segments) <= SEQ
        parts.update(segment.document for segment in segments)
    assert all(parts[document] == -(-int(length) // SEQ) for document, length in enumerate(lengths))


@given(LENGTHS, st.integers(0, 3))
def test_concat_uses_each_token_once_an_epoch(lengths: np.ndarray, epoch: int) -> None:
    total = int(lengths.sum())
    packing = ConcatPacking(lengths, SEQ, (1, 0))
    stream = tokens_of(packing, range((epoch + 1) * packing.sequences + 1))
    assert Counter(stream[epoch * total : (epoch + 1) * total]) == every_token(lengths)


@given(LENGTHS)
def test_concat_fills_every_sequence_and_stays_in_reading_order(lengths: np.ndarray) -> None:
    packing = ConcatPacking(lengths, SEQ, (1, 0))
    for index in range(packing.sequences * 2):
        assert sum(segment.length for segment in packing.segments(index)) == SEQ
    stream = tokens_of(packing, range(packing.sequences))[: int(lengths.sum())]
    for (document, position), (following, start) in pairwise(stream):
        assert (following, start) == (document, position + 1) or start == 0


@given(LENGTHS)
def test_concat_of_one_epoch_ends_with_it(lengths: np.ndarray) -> None:
    packing = ConcatPacking(lengths, SEQ, (1, 0), endless=False)
    assert Counter(tokens_of(packing, range(packing.sequences + 2))) == every_token(lengths)


@given(LENGTHS, st.sampled_from([ConcatPacking, BestFitPacking]), st.integers(0, 60))
def test_a_position_does_not_depend_on_those_before(lengths: np.ndarray, kind: type[Packing], index: int) -> None:
    used = kind(lengths, SEQ, (1, 0))  # type: ignore[call-arg]
    for earlier in range(index):
        used.segments(earlier)
    assert used.segments(index) == kind(lengths, SEQ, (1, 0)).segments(index)  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", [ConcatPacking, BestFitPacking])
def test_epochs_and_seeds_differ_in_order(kind: type[Packing]) -> None:
    lengths = np.full(200, SEQ)

    def order(seed: int, epoch: int) -> list[int]:
        packing = kind(lengths, SEQ, (seed, 0))  # type: ignore[call-arg]
        return [packing.segments(200 * epoch + i)[0].document for i in range(200)]

    assert order(1, 0) == order(1, 0)
    orders = [order(1, 0), order(1, 1), order(2, 0)]
    assert all(sorted(one) == list(range(200)) for one in orders)
    assert len(set(map(tuple, orders))) == 3


def test_the_order_is_fixed_for_good() -> None:
    """A checkpoint's position is worth nothing if an upgrade changes this."""
    assert shuffled(8, 1234, 0, 0).tolist() == [5, 6, 3, 7, 4, 1, 2, 0]


def bins(lengths: list[int], capacity: int) -> list[list[int]]:
    items, offsets = best_fit_decreasing(np.array(lengths, np.int64), capacity)
    return [items[start:end].tolist() for start, end in pairwise(offsets)]


def test_best_fit_takes_the_tightest_bin() -> None:
    # 9 and 8 open bins with room for 1 and 2; 2 goes to the tighter that takes it, 1 to the other.
    assert bins([1, 8, 2, 9, 0], 10) == [[3, 0], [1, 2]]


@given(st.lists(st.integers(0, 20), max_size=60))
def test_best_fit_against_a_plain_search(lengths: list[int]) -> None:
    rooms: list[int] = []
    for length in sorted((length for length in lengths if length), reverse=True):
        fitting = [room for room in rooms if room >= length]
        room = min(fitting, default=20)
        if fitting:
            rooms.remove(room)
        rooms.append(room - length)
    packed = bins(lengths, 20)
    assert sorted(20 - sum(lengths[item] for item in items) for items in packed) == sorted(rooms)
    assert sorted(item for items in packed for item in items) == [i for i, length in enumerate(lengths) if length]
    assert all(items == sorted(items, key=lambda item: -lengths[item]) for items in packed)


@pytest.mark.parametrize("count", [20_000, 300_000])
def test_fill_on_documents_of_realistic_lengths(count: int) -> None:
    """Web text: a median of 500 tokens and a long tail, some documents longer than the sequence."""
    lengths = np.random.default_rng(0).lognormal(6.3, 1.4, count).astype(np.int32) + 1
    packing = BestFitPacking(lengths, 32_768, (1, 0))
    assert lengths.max() > 32_768
    assert packing.tokens_per_sequence / 32_768 >= 0.995
    assert packing.tokens_per_sequence * packing.sequences == pytest.approx(lengths.sum(dtype=np.int64))


def test_millions_of_documents_are_packed_in_seconds() -> None:
    """CPU time, some five times what an idle core takes: nothing in it is quadratic."""
    lengths = np.random.default_rng(0).lognormal(6.3, 1.4, 1_000_000).astype(np.int32) + 1
    start = time.process_time()
    BestFitPacking(lengths, 32_768, (1, 0))
    assert time.process_time() - start < 2
