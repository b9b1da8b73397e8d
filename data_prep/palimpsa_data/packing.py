"""Documents to packed sequences, in a deterministic order that any position can be computed from.

Both packings answer `segments(index)`: which parts of which documents make up packed sequence `index` of an endless
run over the set, epoch after epoch, each epoch in an order of its own. The order depends on the seed and on numpy's
bit generator (whose raw stream is fixed), not on its samplers, which may change between versions.

What takes time and memory in proportion to the documents are named arrays. They come from an `Arrays`: built in memory,
or memory-mapped from files that `prep index` wrote (`palimpsa_data.index`).
"""

from __future__ import annotations

import functools
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

VERSION = 2
"""Part of the name of everything that depends on the algorithms here: raise it when they give another order."""

ArrayMap = dict[str, np.ndarray]
Arrays = Callable[[str, Callable[[], ArrayMap]], ArrayMap]
"""(name, how to build them) -> the arrays of that name."""


class Segment(NamedTuple):
    """Tokens `start` to `start + length` of a document."""

    document: int
    start: int
    length: int


class Packing(Protocol):
    sequences: int
    """Packed sequences of one epoch; the last one may be filled in part, or shared with the next epoch."""
    tokens_per_sequence: float

    def segments(self, index: int) -> list[Segment]: ...

    def prepare(self, epoch: int) -> None:
        """Have the arrays of an epoch made, for an `Arrays` that keeps them."""


def in_memory(name: str, build: Callable[[], ArrayMap]) -> ArrayMap:
    return build()


def shuffled(count: int, *key: int) -> np.ndarray:
    """A permutation of range(count) [count] int64 that depends on `key` alone."""
    draws = np.random.PCG64(np.random.SeedSequence(key)).random_raw(count)
    return np.argsort(draws, kind="stable")


def _name(kind: str, *numbers: int) -> str:
    return "-".join([kind, f"v{VERSION}", *map(str, numbers)])


class ConcatPacking:
    """One stream of shuffled documents, cut every `seq_length` tokens; nothing is dropped between epochs.

    Args:
        lengths: tokens of each document, [D].
        key: what the order depends on (seed, number of the set in its blend).
        endless: the next epoch follows on; otherwise the stream ends after one, with a short last sequence.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        seq_length: int,
        key: tuple[int, ...],
        *,
        endless: bool = True,
        arrays: Arrays = in_memory,
    ) -> None:
        self._lengths, self._seq_length, self._key, self._endless = lengths, seq_length, key, endless
        self._tokens = int(lengths.sum(dtype=np.int64))
        self.sequences = -(-self._tokens // seq_length)
        self.tokens_per_sequence = float(seq_length)
        self._arrays = arrays
        self._epoch = functools.lru_cache(maxsize=2)(self._read_epoch)

    def prepare(self, epoch: int) -> None:
        self._epoch(epoch)

    def segments(self, index: int) -> list[Segment]:
        begin = index * self._seq_length
        end = begin + self._seq_length
        if not self._endless:
            end = min(end, self._tokens)
        found: list[Segment] = []
        while begin < end:
            epoch, offset = divmod(begin, self._tokens)
            order, ends = self._epoch(epoch)
            place = int(np.searchsorted(ends, offset, side="right"))
            document = int(order[place])
            length = min(int(ends[place]) - offset, end - begin)
            found.append(Segment(document, int(self._lengths[document]) - (int(ends[place]) - offset), length))
            begin += length
        return found

    def _read_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        arrays = self._arrays(_name("concat", *self._key, epoch), functools.partial(self._shuffled_epoch, epoch))
        return arrays["order"], arrays["ends"]

    def _shuffled_epoch(self, epoch: int) -> ArrayMap:
        order = shuffled(len(self._lengths), *self._key, epoch)
        return {"order": order, "ends": np.cumsum(self._lengths[order], dtype=np.int64)}


class BestFitPacking:
    """Best-fit decreasing (Ding et al. 2024, arXiv 2404.10830): documents stay whole where they fit.

    Documents longer than `seq_length` are cut into pieces of it, the rest of each packed like a document. The
    composition of a packed sequence is fixed, the order of the sequences is each epoch's own.

    Args:
        lengths: tokens of each document, [D].
        key: what the order depends on (seed, number of the set in its blend).
    """

    def __init__(
        self, lengths: np.ndarray, seq_length: int, key: tuple[int, ...], *, arrays: Arrays = in_memory
    ) -> None:
        packed = arrays(_name("best-fit", seq_length), lambda: _pack(lengths, seq_length))
        # Packed sequence s consists of the segments [S + 1] offsets[s] to offsets[s + 1] of [N, 3] segments.
        self._segments, self._offsets = packed["segments"], packed["offsets"]
        self.sequences = len(self._offsets) - 1
        self.tokens_per_sequence = float(lengths.sum(dtype=np.int64) / self.sequences)
        self._key, self._arrays = key, arrays
        self._order = functools.lru_cache(maxsize=2)(self._shuffled_epoch)

    def prepare(self, epoch: int) -> None:
        """Nothing: an order of the sequences is quickly made."""

    def segments(self, index: int) -> list[Segment]:
        epoch, place = divmod(index, self.sequences)
        chosen = int(self._order(epoch)[place])
        rows = self._segments[int(self._offsets[chosen]) : int(self._offsets[chosen + 1])]
        return [Segment(*row) for row in rows.tolist()]

    def _shuffled_epoch(self, epoch: int) -> np.ndarray:
        return shuffled(self.sequences, *self._key, epoch)


def _pack(lengths: np.ndarray, seq_length: int) -> ArrayMap:
    """Whole pieces first, one a sequence, then the bins of what is left over."""
    full, rest = np.divmod(lengths.astype(np.int64), seq_length)
    pieces = np.repeat(np.arange(len(lengths)), full)
    starts = (np.arange(len(pieces)) - np.repeat(np.cumsum(full) - full, full)) * seq_length
    whole = np.stack([pieces, starts, np.full(len(pieces), seq_length)], axis=1)
    items, offsets = best_fit_decreasing(rest, seq_length)
    binned = np.stack([items, full[items] * seq_length, rest[items]], axis=1)
    return {
        "segments": np.concatenate([whole, binned]),
        "offsets": np.concatenate([np.arange(len(whole)), len(whole) + offsets]),
    }


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Items to bins: each item, longest first, into the bin with the least room that takes it.

    Items of one length are placed together: the tightest bin takes one after the other until it is too full, then all
    bins with the same room do alike. The time is that of the distinct lengths and rooms, not of the items.

    Args:
        lengths: [D], each from 0 to `capacity`; items of length 0 are left out.

    Returns:
        items [N] and offsets [B + 1]: bin b holds items[offsets[b] : offsets[b + 1]], longest first.
    """
    order = np.argsort(-lengths, kind="stable")
    order = order[: np.count_nonzero(lengths)]
    values, counts = np.unique(-lengths[order], return_counts=True)
    bins = _Bins(capacity)
    for length, count in zip((-values).tolist(), counts.tolist(), strict=True):
        bins.place(length, count)
    chosen = np.array(bins.chosen, np.int64)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(chosen, minlength=bins.count), dtype=np.int64)])
    return order[np.argsort(chosen, kind="stable")], offsets


class _Bins:
    """Bins by the room they have left; `chosen` is the bin of each item placed so far."""

    def __init__(self, capacity: int) -> None:
        self.chosen: list[int] = []
        self.count = 0
        self._capacity = capacity
        self._by_room: dict[int, list[int]] = {}
        self._rooms: list[int] = []  # ascending, those with at least one bin

    def place(self, length: int, count: int) -> None:
        """Place `count` items of one length."""
        while count:
            position = bisect_left(self._rooms, length)
            room = self._rooms[position] if position < len(self._rooms) else self._capacity
            each = room // length
            wanted = max(count // each, 1)
            each = min(each, count)
            if position < len(self._rooms):
                taken = self._take(room, position, wanted)
            else:
                taken = list(range(self.count, self.count + wanted))
                self.count += wanted
            self.chosen.extend(taken * each)
            count -= len(taken) * each
            self._put(room - length * each, taken)

    def _take(self, room: int, position: int, wanted: int) -> list[int]:
        held = self._by_room[room]
        taken = held[-wanted:]
        del held[-wanted:]
        if not held:
            del self._by_room[room], self._rooms[position]
        return taken

    def _put(self, room: int, bins: list[int]) -> None:
        if not room:
            return
        if room not in self._by_room:
            insort(self._rooms, room)
            self._by_room[room] = []
        self._by_room[room].extend(bins)
