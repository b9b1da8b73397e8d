"""The table of layouts itself: which rows it has, which are refused, and which few rows cover it."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest
from helpers import layout_table
from helpers.covering import covering_subset, pairs
from helpers.layout_table import COVERING, LEGAL, MOST_RANKS, Layout, Pipeline, refusal
from helpers.stages import tiny_stage

from megatron_palimpsa.config import ConfigError


def test_every_pair_of_values_that_can_run_meets_in_the_covering_rows() -> None:
    def meetings(rows: list[Layout]) -> set[tuple[Any, ...]]:
        return {(a, getattr(row, a), b, getattr(row, b)) for row in rows for a, b in combinations(layout_table.AXES, 2)}

    assert set(COVERING) <= set(LEGAL)
    assert meetings(COVERING) == meetings(LEGAL)
    for axis, values in layout_table.AXES.items():
        assert {getattr(row, axis) for row in COVERING} == set(values)


def test_combinations_are_refused_by_the_configuration_check_alone() -> None:
    """Of those that fit on four ranks only sequence parallelism without tensor parallelism cannot run."""
    refused = {layout: reason for layout in layout_table.combinations() if (reason := refusal(layout)) is not None}
    assert set(refused.values()) == {"parallel.sequence_parallel=true needs parallel.tp > 1"}
    assert set(refused) == {
        layout for layout in layout_table.combinations() if layout.sequence_parallel and layout.tp == 1
    }
    assert len(LEGAL) == len(set(LEGAL)) == len(layout_table.combinations()) - len(refused)
    assert max(layout.ranks for layout in LEGAL) == MOST_RANKS


@pytest.mark.parametrize(
    ("ranks", "sections", "message"),
    [
        (
            3,
            {"parallel": {"tp": 3}},
            "parallel.tp=3 does not divide the number of heads (expand * hidden_size / headdim), which is 8",
        ),
        (
            2,
            {"parallel": {"pp": 2}, "model": {"pattern": "M|P|M"}},
            "model.pattern='M|P|M' marks 3 pipeline stages (none may be empty), parallel.pp=2 needs 2",
        ),
        (
            2,
            {"parallel": {"pp": 2, "vpp": 2}, "model": {"pattern": "M|P"}},
            "model.pattern='M|P' marks 2 pipeline stages (none may be empty), parallel.pp=2 * parallel.vpp=2 needs 4",
        ),
        (
            2,
            {"parallel": {"pp": 2}, "model": {"pattern": "MPM"}},
            "parallel.pp=2 does not divide the 3 layers of model.pattern='MPM'; "
            "mark the 2 stages with | in the pattern",
        ),
        (3, {"parallel": {"cp": 3}}, "parallel.cp=3 does not divide model.seq_length, which is 32"),
        (
            2,
            {"train": {"global_batch_tokens": 96}},
            "train.global_batch_tokens=96 is not a multiple of 64 "
            "(train.micro_batch_size 1 * data-parallel size 2 * model.seq_length 32); "
            "with train.micro_batch_size=1 it may be 128, or split the ranks with parallel.tp, pp or cp",
        ),
        (4, {"parallel": {"tp": 4}}, "parallel.tp=4 does not divide model.num_query_groups, which is 2"),
    ],
    ids=["heads", "stages", "interleaved stages", "layers", "sequence", "batch", "query groups"],
)
def test_layouts_that_do_not_fit_are_refused_naming_the_values(
    ranks: int, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny_stage(ranks, **sections)
    assert str(caught.value) == message


def test_generator_covers_a_full_product_in_few_rows() -> None:
    rows = list(product(range(3), range(3), range(2), range(2), range(2)))
    chosen = covering_subset(rows, cost=lambda row: 1.0)
    wanted = {pair for row in rows for pair in pairs(row)}
    assert {pair for row in chosen for pair in pairs(row)} == wanted
    # Nine rows are the least, because two columns have three values each.
    assert 9 <= len(chosen) <= 12
    assert chosen == covering_subset(rows, cost=lambda row: 1.0)


def test_generator_takes_what_must_be_taken_and_nothing_else() -> None:
    rows = [("a", 1, "x"), ("a", 1, "y"), ("b", 1, "x"), ("a", 2, "x")]
    # No pair of the first row is its own.
    assert covering_subset(rows, cost=lambda row: 1.0) == rows[1:]
    # The same values in other columns are another pair.
    assert covering_subset([(1, 2), (2, 1)], cost=lambda row: 1.0) == [(1, 2), (2, 1)]


def test_generator_prefers_cheap_rows() -> None:
    rows = [(first, second, third) for first in (8, 1) for second in (0, 1) for third in (0, 1)]
    dear = [row for row in covering_subset(rows, cost=lambda row: row[0]) if row[0] == 8]  # type: ignore[return-value]
    assert len(dear) == 2


def test_names_tell_rows_apart() -> None:
    assert len({layout.name for layout in LEGAL}) == len(LEGAL)
    layout = Layout(tp=2, sequence_parallel=True, pipeline=Pipeline(2, 2), distributed_optimizer=True, tied=False)
    assert layout.name == "tp2-pp2-vpp2-sp-distopt-g1-untied"
    assert Layout(tp=4, ngroups=2).one_process.name == "g2-tied"
