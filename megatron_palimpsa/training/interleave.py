"""How the sets of a blend take turns."""

from __future__ import annotations

import numpy as np

_PATTERN_LENGTH = 2**16


class Interleave:
    """Which set the n-th sequence comes from: a fixed pattern in which every set's sequences are spread evenly.

    The pattern has 2**16 places, so that shares are met to 1.5e-5; every set gets one place at least.

    Args:
        rates: [S] > 0, in proportion to the sets' shares of the sequences.
    """

    def __init__(self, rates: np.ndarray) -> None:
        exact = rates / rates.sum() * _PATTERN_LENGTH
        counts = np.maximum(np.floor(exact).astype(np.int64), 1)
        # Largest remainders take what rounding down left over; the largest set gives what the smallest were lent.
        missing = _PATTERN_LENGTH - int(counts.sum())
        if missing > 0:
            counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
        else:
            counts[np.argmax(counts)] += missing
        self.shares = counts / _PATTERN_LENGTH
        times = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        self._pattern = np.repeat(np.arange(len(counts)), counts)[np.argsort(times, kind="stable")]
        self._before = np.zeros((_PATTERN_LENGTH + 1, len(counts)), np.int64)
        self._before[1:] = np.cumsum(self._pattern[:, None] == np.arange(len(counts)), axis=0)

    def place(self, n: int) -> tuple[int, int]:
        number = int(self._pattern[n % _PATTERN_LENGTH])
        return number, self.count(number, n)

    def count(self, number: int, n: int) -> int:
        """Sequences of set `number` among the first n."""
        rounds, rest = divmod(n, _PATTERN_LENGTH)
        return rounds * int(self._before[-1, number]) + int(self._before[rest, number])
