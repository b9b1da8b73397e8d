"""Random choices that stay the same for good: numpy's raw PCG64 stream, none of its samplers, which may change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
_AT_ONCE = 512


class Draw:
    """A stream of choices that depends on `key` alone."""

    def __init__(self, *key: int) -> None:
        import numpy as np  # late: the command line needs the tasks' names at once

        self._bits = np.random.PCG64(np.random.SeedSequence(key))
        self._raw: list[int] = []

    def below(self, count: int) -> int:
        """0 to count - 1."""
        if not self._raw:
            self._raw = self._bits.random_raw(_AT_ONCE).tolist()
        return self._raw.pop() * count >> 64

    def between(self, low: int, high: int) -> int:
        """Both included."""
        return low + self.below(high - low + 1)

    def fraction(self) -> float:
        """From 0 up to, not including, 1."""
        return self.below(2**53) / 2**53

    def choice(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        left = list(items)
        for place in range(len(left) - 1, 0, -1):
            other = self.below(place + 1)
            left[place], left[other] = left[other], left[place]
        return left
