"""Context parallelism: parts of packed rows on several ranks compute what one process does with the whole rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import context_ranks
from helpers.workers import FirstWorkers, Workers

from megatron_palimpsa import parallel
from megatron_palimpsa.config import ParallelConfig
from megatron_palimpsa.model.build import packed_sequence
from megatron_palimpsa.model.context_parallel import crossed_part


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What one process computes, by geometry."""
    folder = tmp_path_factory.mktemp("context")
    parallel.initialize(ParallelConfig(), seed=1)
    try:
        for geometry in context_ranks.GEOMETRIES:
            context_ranks.single_process_results(folder, geometry)
    finally:
        parallel.destroy()
    return folder


LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "cp4": ("one group", {"cp": 4}),
    "cp4-wide": ("two groups, wide convolutions", {"cp": 4}),
    "cp4-own-keys": ("a head's own keys", {"cp": 4}),
    "cp2-tp2-own-keys": ("a head's own keys", {"cp": 2, "tp": 2, "sequence_parallel": True}),
    "cp2-dp2": ("two groups, wide convolutions", {"cp": 2}),
    "cp2-tp2": ("two groups, wide convolutions", {"cp": 2, "tp": 2}),
    "cp2-tp2-sequence-parallel": ("one group", {"cp": 2, "tp": 2, "sequence_parallel": True}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_compute_what_the_whole_row_does(layout: str, four_processes: Workers, folder: Path) -> None:
    four_processes.run(context_ranks.compare_rows, folder, *LAYOUTS[layout])


@pytest.mark.parametrize("groups", [1, 2])
def test_benchmark_finds_both_ways_right_and_times_them(groups: int, two_processes: FirstWorkers) -> None:
    records = two_processes.run(context_ranks.benchmark_records, groups)[0]
    assert [record["way"] for record in records] == ["states", "heads", "apart", "one rank"] * 2
    for record in records:
        assert record["ranks"] == 2
        assert (record["error"] is not None) == (record["way"] in ("states", "heads"))
        assert record["error"] is None or record["error"] < 1e-5
        assert record["forward_backward_ms"] > 0


def test_benchmark_times_a_middle_part_alone() -> None:
    records = context_ranks.middle_records()
    assert [(record["layer"], record["way"]) for record in records] == [
        (layer, way) for layer in ("P", "M") for way in ("apart", "states")
    ]
    assert all(0 < record["forward_ms"] < record["forward_backward_ms"] for record in records)


class _TwoRanks:
    def size(self) -> int:
        return 2


def test_whole_rows_are_refused_where_parts_are_expected() -> None:
    packed = packed_sequence(torch.tensor([0, 32], dtype=torch.int32))
    for given in (None, packed):
        with pytest.raises(ValueError, match=r"context parallelism over 2 ranks takes parts of packed rows"):
            crossed_part(given, _TwoRanks())  # type: ignore[arg-type]
