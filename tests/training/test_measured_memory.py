"""The memory estimate against peaks that `bench` measured on GPUs, docs/training-*.csv; none was used to make it."""

import csv
from pathlib import Path

import pytest
from palimpsa_launch import stages

from megatron_palimpsa.config import load_stage
from megatron_palimpsa.training.memory import estimate_memory

RECIPES = {"bench-2.7b": "bench/2.7b", "palimpsa": "760m/palimpsa", "palimpsa-d": "760m/palimpsa-d"}
"""Of each name of a stage in the records."""
DOCS = Path(__file__).resolve().parents[2] / "docs"
MEASURED = [
    row
    for path in sorted(DOCS.glob("training-*.csv"))
    for row in csv.DictReader(path.read_text().splitlines())
    if row["status"] == "ok" and row["kernels"] in ("auto", "own")
]


def test_enough_configurations_were_measured() -> None:
    assert len({row["overrides"] for row in MEASURED}) >= 8


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: row["case"])
def test_estimate_is_within_ten_percent(row: dict[str, str]) -> None:
    config = load_stage(stages.path(RECIPES[row["stage"]]), row["overrides"].split())
    estimate = estimate_memory(config, int(row["dp"])).total
    assert estimate == pytest.approx(int(row["peak_bytes"]), rel=0.1)
