"""The demo's order, skipping and stopping, with `helpers.fake_demo_cli` in place of the real commands."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_palimpsa import cli, demo
from megatron_palimpsa.config import ConfigError, load_stage

TESTS = Path(__file__).parent
ROOT = TESTS.parent
RUN = (
    "import sys; from pathlib import Path; from megatron_palimpsa import demo;"
    "demo._MODULE = 'helpers.fake_demo_cli'; sys.exit(demo.run(Path(sys.argv[1])))"
)
STAGES = ["train continue-pretraining", "train long-context", "train instruct"]


class Demo:
    def __init__(self, folder: Path) -> None:
        self.place = folder / "fake"
        self.place.mkdir()
        self.folder = folder / "a demo: with odd # letters"

    def stage_does(self, stage: str, what: str) -> None:
        (self.place / f"{stage}.does").write_text(what)

    def take_calls(self) -> list[str]:
        """Commands since the last call, recipes by their names."""
        file = self.place / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        words = [line.split() for line in lines]
        return [f"train {Path(word[1]).stem}" if word[0] == "train" else word[0] for word in words]

    def start(self) -> subprocess.Popen[str]:
        paths = [TESTS, ROOT, ROOT / "launch", ROOT / "data_prep", ROOT / "kernels"]
        return subprocess.Popen(
            [sys.executable, "-c", RUN, str(self.folder)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "FAKE_DEMO": str(self.place)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self) -> tuple[int, str]:
        process = self.start()
        output, _ = process.communicate(timeout=240)
        return process.returncode, output

    def wait_for_stage(self, stage: str) -> int:
        file = self.place / f"{stage}.pid"
        deadline = time.monotonic() + 240
        while not file.exists() or not file.read_text():
            assert time.monotonic() < deadline, f"{stage} never started"
            time.sleep(0.02)
        return int(file.read_text())


def state_of(process: int) -> str:
    return subprocess.run(["ps", "-p", str(process), "-o", "stat="], capture_output=True, text=True).stdout.strip()


@pytest.fixture
def tiny(tmp_path: Path) -> Demo:
    return Demo(tmp_path)


def test_runs_every_part_in_order_then_says_it_is_finished(tiny: Demo) -> None:
    code, output = tiny.run()
    assert code == 0, output
    assert tiny.take_calls() == ["prep", *STAGES, "report"]
    assert "[3/5] long-context" in output
    assert "The demo is finished after" in output
    code, output = tiny.run()
    assert code == 0
    assert tiny.take_calls() == []
    assert "is finished" in output
    assert "| instruct " in output


def test_everything_lands_in_the_folder_named(tiny: Demo) -> None:
    assert tiny.run()[0] == 0
    assert sorted(path.name for path in tiny.folder.iterdir() if not path.name.startswith(".")) == [
        "continue-pretraining", "instruct", "long-context", "report",
    ]  # fmt: skip
    config = (tiny.folder / "instruct" / "config.yaml").read_text()
    assert "runs/demo" not in config


@pytest.mark.parametrize(
    ("what", "code", "says"),
    [("exit 3", 3, "exit code 3"), ("exit 2", 2, "exit code 2"), ("kill", 128 + 9, "ended by SIGKILL")],
)
def test_a_failing_stage_stops_the_demo_which_then_goes_on_from_it(tiny: Demo, what: str, code: int, says: str) -> None:
    tiny.stage_does("long-context", what)
    stopped, output = tiny.run()
    assert stopped == code
    assert says in output
    assert tiny.take_calls() == ["prep", *STAGES[:2]]
    assert tiny.run()[0] == 0
    assert tiny.take_calls() == ["prep", *STAGES[1:], "report"]


def test_a_stage_killed_between_its_last_step_and_its_marker_goes_on(tiny: Demo) -> None:
    assert tiny.run()[0] == 0
    (tiny.folder / "continue-pretraining" / "STAGE_COMPLETE").unlink()
    config = load_stage(tiny.folder / "continue-pretraining" / "config.yaml")
    last = json.dumps({"kind": "train", "step": config.total_steps, "tokens": 1, "loss": 1.0})
    (tiny.folder / "continue-pretraining" / "metrics.jsonl").write_text(last + "\n")
    tiny.take_calls()
    tiny.run()
    assert tiny.take_calls()[:2] == ["prep", STAGES[0]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_stage_save_and_ends_with_75(tiny: Demo, number: signal.Signals) -> None:
    tiny.stage_does("continue-pretraining", "wait")
    process = tiny.start()
    tiny.wait_for_stage("continue-pretraining")
    process.send_signal(number)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 75, output
    assert "goes on from here" in output
    assert tiny.take_calls() == ["prep", STAGES[0]]


def test_sigkill_takes_the_running_stage_along_and_the_next_run_goes_on(tiny: Demo) -> None:
    tiny.stage_does("long-context", "wait")
    process = tiny.start()
    stage = tiny.wait_for_stage("long-context")
    os.kill(stage, signal.SIGSTOP)
    while not state_of(stage).startswith("T"):
        time.sleep(0.02)
    process.kill()
    assert process.wait(timeout=240) == -signal.SIGKILL
    with (tiny.folder / ".demo.lock").open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.kill(stage, signal.SIGCONT)
    process.communicate(timeout=240)
    tiny.take_calls()
    code, output = tiny.run()
    assert code == 0, output
    assert state_of(stage)[:1] in ("", "Z")
    assert tiny.take_calls() == ["prep", *STAGES[1:], "report"]


def test_two_demos_in_one_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_LOCK_PATIENCE", 0.1)
    message = rf"another demo runs there \(process {os.getpid()}\)"
    with demo._only_one(tmp_path), pytest.raises(ConfigError, match=message):
        demo.run(tmp_path)


def test_the_engine_reaches_every_stage(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    trained = [part for part in demo._parts(tmp_path, "deepspeed") if part.stage is not None]
    assert len(trained) == 3
    for part in trained:
        _, recipe, *overrides = part.command
        assert load_stage(Path(recipe), overrides).parallel.engine == "deepspeed"


def test_a_missing_engine_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    assert cli.main(["demo", "--folder", str(tmp_path / "demo"), "--engine", "deepspeed"]) == 2
    assert "DeepSpeed is not installed" in capsys.readouterr().err
    assert not (tmp_path / "demo" / "data").exists()
