"""A stage that was trained, for each module here."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.runs import train_in_new_process, write_stage


@pytest.fixture(scope="session")
def trained_stage(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    """In bf16 under recomputation, with steps large enough to be far from the initial weights; checkpoints 4 and 8."""
    folder = tmp_path_factory.mktemp("trained")
    settings = {"train": {"precision": "bf16", "recompute": "full"}, "optimizer": {"lr": 0.1}}
    assert train_in_new_process(write_stage(folder, tiny_data, **settings)) == 0
    return folder / "runs" / "stage"
