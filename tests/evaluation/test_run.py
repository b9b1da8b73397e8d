"""`eval run`: results that stay whatever happens, the same after a kill, refused where they would mix."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.longbench import write_longbench
from helpers.random_stage import write_random_stage
from helpers.runs import run_ranks

from megatron_palimpsa import cli, evaluation
from megatron_palimpsa.evaluation import run as evaluation_run
from megatron_palimpsa.evaluation.results import Metric, TaskResult
from megatron_palimpsa.evaluation.tables import markdown

PNG = b"\x89PNG"
TASKS = "ruler/vt,ruler/fwe,longbench_v2_choice"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_longbench(tmp_path_factory.mktemp("data"))


def arguments(stage: Path, output: Path, data: Path, tasks: str = TASKS) -> list[str]:
    settings = ["--tasks", tasks, "--data", str(data), "--lengths", "1800", "--limit", "2", "--max-length", "0"]
    return ["eval", "run", str(stage), "--output", str(output), *settings]


def evaluate_and_die(arguments: list[str], environment: dict[str, str], results: int) -> None:
    """In a process of its own: SIGKILL once so many results are written."""
    from megatron_palimpsa.evaluation.results import ResultFolder

    write = ResultFolder.write

    def write_and_die(self: ResultFolder, result: TaskResult) -> None:
        write(self, result)
        if len(list((self.path / "tasks").glob("*.json"))) == results:
            os.kill(os.getpid(), signal.SIGKILL)

    ResultFolder.write = write_and_die  # type: ignore[method-assign]
    sys.exit(cli.main(arguments))


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(list(arguments)) == 2
    (message,) = capsys.readouterr().err.splitlines()
    return message.removeprefix("megatron-palimpsa: error: ")


def test_after_a_kill_the_same_command_ends_with_the_same_results(
    evaluated_stage: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    unbroken, killed = tmp_path / "unbroken", tmp_path / "killed"
    assert cli.main(arguments(evaluated_stage, unbroken, data)) == 0
    said = capsys.readouterr().out
    (code,) = run_ranks(evaluate_and_die, arguments(evaluated_stage, killed, data), [2], seconds=300)
    assert code == -signal.SIGKILL
    done = sorted((killed / "tasks").glob("*.json"))
    assert len(done) == 2
    assert not (killed / "results.json").exists()
    before = [path.stat().st_mtime_ns for path in done]
    assert cli.main(arguments(evaluated_stage, killed, data)) == 0
    assert "3 tasks, 2 of them done already" in capsys.readouterr().out
    assert [path.stat().st_mtime_ns for path in done] == before
    for name in ("settings.json", "results.json", "results.md", *(f"tasks/{path.name}" for path in done)):
        assert (killed / name).read_bytes() == (unbroken / name).read_bytes(), name
    results = json.loads((unbroken / "results.json").read_text())["results"]
    names = ["longbench_v2_choice", "ruler/fwe/1800", "ruler/vt/1800"]
    assert [one["task"] for one in results] == names
    assert {one["items"] for one in results} == {2}
    assert (unbroken / "results.png").read_bytes().startswith(PNG)
    assert (unbroken / "results.md").read_text() in said
    # Nothing is left to do: nothing is.
    monkeypatch.setattr(evaluation_run, "_run", None)
    assert cli.main(arguments(evaluated_stage, unbroken, data)) == 0


def test_more_tasks_may_follow_and_nothing_else_may_mix_in(
    evaluated_stage: Path, data: Path, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "results"
    assert cli.main(arguments(evaluated_stage, output, data, "ruler/fwe")) == 0
    assert cli.main(arguments(evaluated_stage / "checkpoints" / "step-8", output, data, "longbench_v2_choice")) == 0
    capsys.readouterr()
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    other = write_random_stage(tmp_path, tiny_data, seed=1)
    assert "holds results with other settings (weights: " in refusal(capsys, *arguments(other, output, data))
    again = arguments(evaluated_stage, output, data)
    assert "(seed: 0 there, 5 here)" in refusal(capsys, *again, "--seed", "5")
    assert "precision: 'fp32' there, 'bf16' here" in refusal(capsys, *again, "--precision", "bf16")
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before
    (output / "settings.json").unlink()
    assert "holds no results of an evaluation" in refusal(capsys, *again)


def test_an_export_of_the_stage_is_the_same_model(
    evaluated_stage: Path, data: Path, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="exports need transformers")
    exported, output = tmp_path / "exported", tmp_path / "results"
    assert cli.main(["export", str(evaluated_stage), str(exported)]) == 0
    of_stage = arguments(evaluated_stage, output, data, "longbench_v2_choice")
    assert cli.main(of_stage) == 0
    capsys.readouterr()
    of_export = arguments(exported, output, data, "longbench_v2_choice,ruler/fwe")
    assert cli.main([*of_export, "--tokenizer", str(tiny_data / "tokenizer.model")]) == 0
    assert "2 tasks, 1 of them done already" in capsys.readouterr().out
    other = tmp_path / "own tokenizer"
    assert cli.main(arguments(exported, other, data, "longbench_v2_choice")) == 0
    name = "tasks/longbench_v2_choice.json"
    assert (other / name).read_bytes() == (output / name).read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--tasks", "ruler/niah"], "RULER has no task 'ruler/niah'; it has ruler/niah_single_1"),
        (["--tasks", ","], "--tasks: name one at least"),
        (["--tasks", "ruler/qa_squad"], "task ruler/qa_squad: needs the file ruler/squad.json below --data"),
        (["--tasks", "ruler/cwe"], "task ruler/cwe: does not fit into 1800 tokens"),
        (["--data", "absent"], "absent: is no folder"),
        (["--max-length", "255"], "task longbench_v2: of --max-length 255 tokens 128 are the answer's; give 256 or"),
    ],
)
def test_wrong_input_is_one_message(
    evaluated_stage: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: list[str],
    message: str,
) -> None:
    assert message in refusal(capsys, *arguments(evaluated_stage, tmp_path / "results", data), *changes)
    assert not (tmp_path / "results").exists()


def test_without_the_harness_its_tasks_say_what_to_install(
    evaluated_stage: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == "lm_eval" or name == "megatron_palimpsa.evaluation.harness":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(evaluation, "harness", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    message = refusal(capsys, *arguments(evaluated_stage, tmp_path / "results", data, "paper"))
    assert "need the package lm_eval" in message
    assert "pip install -e '.[eval]'" in message
    assert not (tmp_path / "results").exists()


def test_what_is_no_model_is_one_message(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds no stage" in refusal(capsys, *arguments(tmp_path, tmp_path / "results", data))
    assert not (tmp_path / "results").exists()


def test_tables_have_the_papers_columns_and_what_was_left_out() -> None:
    truncated = {"truncation": {"inputs": 3, "tokens": 70, "longest": 900}}
    results = [
        TaskResult("lambada_openai", 5, {"acc": Metric(0.5, 0.01), "perplexity": Metric(21.5)}),
        TaskResult("hellaswag", 5, {"acc": Metric(0.3), "acc_norm": Metric(0.4, 0.02)}, truncated),
        *(TaskResult(f"ruler/vt/{length}", 5, {"score": Metric(0.25, 0.1)}) for length in (8192, 4096)),
        TaskResult("ruler/cwe/4096", 5, {"score": Metric(0.75, None)}),
    ]
    text = markdown(results)
    for line in (
        "| LAMBADA          | 50.0 ± 1.0 |",
        "| LAMBADA ppl      |      21.50 |",
        "| HellaSwag (norm) | 40.0 ± 2.0 |",
        "| task |       4,096 |       8,192 |",
        "| vt   | 25.0 ± 10.0 | 25.0 ± 10.0 |",
        "| mean |        50.0 |        25.0 |",
        "- hellaswag: 3 inputs lost 70 tokens together; the longest had 900",
    ):
        assert line in text, text
