"""Document lengths as counts in buckets, small enough for every manifest."""

from __future__ import annotations

from collections import Counter

import numpy as np

BUCKETS = np.unique(np.ceil(2.0 ** (np.arange(4 * 40) / 4)).astype(np.int64))
"""The shortest length of each bucket, in tokens; four buckets from one power of two to the next."""


def histogram(lengths: np.ndarray) -> Counter[int]:
    """Documents by bucket: {shortest length of the bucket: how many of `lengths` [D], all at least 1}."""
    places, counts = np.unique(np.searchsorted(BUCKETS, lengths, side="right") - 1, return_counts=True)
    return Counter(dict(zip(BUCKETS[places].tolist(), counts.tolist(), strict=True)))
