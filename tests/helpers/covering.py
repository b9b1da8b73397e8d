"""Few rows of a table in which every pair of values still meets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

Row = tuple[object, ...]
Pair = tuple[int, object, int, object]


def pairs(row: Row) -> frozenset[Pair]:
    """Every two values of a row with their columns."""
    return frozenset((*first, *second) for first, second in combinations(enumerate(row), 2))


def covering_subset(rows: Sequence[Row], cost: Callable[[Row], float]) -> list[Row]:
    """Rows that hold every pair that any row holds, in the order of `rows`.

    Greedy: the row with most pairs still missing is next, the cheapest of several, the first of several as cheap.
    Rows whose pairs all lie in others are dropped at the end, the dearest first. The same rows give the same subset.
    """
    missing = frozenset[Pair]().union(*map(pairs, rows))
    chosen: list[Row] = []
    while missing:
        best = max(rows, key=lambda row: (len(pairs(row) & missing), -cost(row)))
        chosen.append(best)
        missing -= pairs(best)
    for row in sorted(chosen, key=cost, reverse=True):
        others = [other for other in chosen if other != row]
        if pairs(row) <= frozenset[Pair]().union(*map(pairs, others)):
            chosen = others
    return [row for row in rows if row in chosen]
