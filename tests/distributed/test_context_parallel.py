"""Context parallelism: parts of packed rows on several ranks compute what one process does with the whole rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import context_ranks
from helpers.workers import Workers

from megatron_palimpsa import parallel
from megatron_palimpsa.config import ParallelConfig


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
    "cp2-dp2": ("two groups, wide convolutions", {"cp": 2}),
    "cp2-tp2": ("two groups, wide convolutions", {"cp": 2, "tp": 2}),
    "cp2-tp2-sequence-parallel": ("one group", {"cp": 2, "tp": 2, "sequence_parallel": True}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_compute_what_the_whole_row_does(layout: str, four_processes: Workers, folder: Path) -> None:
    four_processes.run(context_ranks.compare_rows, folder, *LAYOUTS[layout])
