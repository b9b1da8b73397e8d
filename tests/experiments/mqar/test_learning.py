"""The CPU-sized sweep learns, in two processes that share it."""

import json
from pathlib import Path

import pytest

from megatron_palimpsa import cli


@pytest.mark.long
def test_both_models_learn_64_tokens_in_two_processes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipes = ["mqar/small/palimpsa-m", "mqar/small/mamba2"]
    arguments = ["mqar", *recipes, f"output_dir={tmp_path}", "sweep.seeds=[0]", "--jobs", "2"]
    assert cli.main(arguments) == 0
    assert capfd.readouterr().out.count("of all runs about 0:00:00") >= 1
    for model in ("palimpsa-m", "mamba2"):
        result = json.loads((tmp_path / model / "lr-0.01-seed-0" / "result.json").read_text())
        # Of 32 values one is right by chance; one of the 16 in sight once in 16 times.
        last = result["records"][-1]
        assert last["length"] == 64
        assert last["accuracy"] > 0.7
        assert last["memory"]["1"]["window"] > 100
    assert "| palimpsa-m | 64 | 16 |" in (tmp_path / "report" / "report.md").read_text()
