"""The folder of results: files that are damaged or of another task are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.evaluation.results import Metric, ResultFolder, TaskResult

SETTINGS = {"seed": 1}
GOOD = {"task": "a/b", "items": 3, "metrics": {"acc": {"value": 0.5, "stderr": None}}, "details": {}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Of the one task in the folder."""
    ResultFolder(tmp_path / "results", SETTINGS).write(TaskResult("a/b", 3, {"acc": Metric(0.5)}))
    path = tmp_path / "results" / "tasks" / "a--b.json"
    assert json.loads(path.read_text()) == GOOD
    return path


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"[]", "holds no JSON object"),
        ({**GOOD, "task": "a"}, "is a result of a"),
        ({**GOOD, "items": "many"}, "items='many'"),
        ({**GOOD, "metrics": {"acc": {"value": "x"}}}, "metrics.acc.value='x'"),
        ({**GOOD, "metrics": {"acc": {"value": 1, "stderr": []}}}, "metrics.acc.stderr=[]"),
        ({**GOOD, "metrics": 3}, "metrics=3"),
        ({**GOOD, "details": []}, "details=[]"),
        ({"task": "a/b"}, "items is missing"),
    ],
)
def test_a_damaged_result_is_one_message(file: Path, content: Any, expected: str) -> None:
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    folder = ResultFolder(file.parents[1], SETTINGS)
    with pytest.raises(ConfigError) as refused:
        folder.all()
    assert str(file) in str(refused.value)
    assert expected in str(refused.value)
    assert "remove it to evaluate again" in str(refused.value)


def test_damaged_settings_say_what_to_do(file: Path) -> None:
    settings = file.parents[1] / "settings.json"
    settings.write_text("{")
    with pytest.raises(ConfigError, match=r"settings.json: cannot be read .*; name another --output, or remove "):
        ResultFolder(file.parents[1], SETTINGS)


def test_a_place_that_is_no_folder(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"--output: .*a--b.json is not a folder"):
        ResultFolder(file / "results", SETTINGS)
