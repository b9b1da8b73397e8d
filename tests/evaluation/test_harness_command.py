"""`eval run` with a task of lm-evaluation-harness."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from megatron_palimpsa import cli

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (the extra `eval`)")


def test_the_command_runs_it_on_a_stage_and_on_its_export(
    evaluated_stage: Path,
    harness: ModuleType,
    harness_data: Path,
    include: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    exported = tmp_path / "exported"
    assert cli.main(["export", str(evaluated_stage), str(exported)]) == 0
    found = []
    for model, output in ((evaluated_stage, tmp_path / "of stage"), (exported, tmp_path / "of export")):
        command = ["eval", "run", str(model), "--output", str(output), "--tasks", "own_choice"]
        assert cli.main([*command, "--data", str(harness_data), "--include", str(include)]) == 0
        assert "| own_choice: acc_norm |" in capsys.readouterr().out
        found.append(json.loads((output / "results.json").read_text())["results"])
    assert found[0] == found[1]
    assert [(one["task"], one["items"]) for one in found[0]] == [("own_choice", 3)]
