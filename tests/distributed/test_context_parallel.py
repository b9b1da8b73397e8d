"""Context parallelism: parts of packed rows on several ranks compute what one process does with the whole rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import context_ranks
from helpers.stages import random_batch, tiny_stage
from helpers.workers import Workers

from megatron_palimpsa.training.batch import RowPart


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Workers]:
    workers = Workers(4)
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, single_process) -> Path:
    """What one process computes, by geometry."""
    folder = tmp_path_factory.mktemp("context")
    for geometry in context_ranks.GEOMETRIES:
        context_ranks.single_process_results(folder, geometry)
    return folder


LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "cp4": ("one group", {"cp": 4}),
    "cp2-dp2": ("two groups, wide convolutions", {"cp": 2}),
    "cp2-tp2": ("two groups, wide convolutions", {"cp": 2, "tp": 2}),
    "cp2-tp2-sequence-parallel": ("one group", {"cp": 2, "tp": 2, "sequence_parallel": True}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_compute_what_the_whole_row_does(four_ranks, folder, layout):
    four_ranks.run(context_ranks.compare_rows, folder, *LAYOUTS[layout])
