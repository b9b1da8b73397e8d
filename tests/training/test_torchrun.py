"""The command as a launcher starts it: torchrun's ranks, a real signal from outside, a resume on other ranks."""

import os
import re
import signal
import time

import psutil
import pytest
from helpers.runs import run, start, write_stage

from megatron_palimpsa.training.exit_codes import ExitCode
from megatron_palimpsa.training.metrics import read_records
from megatron_palimpsa.training.run_folder import RunFolder


@pytest.mark.long
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"cp": 2}, {}], ids=["tp2", "pp2", "cp2", "dp2"])
def test_signal_to_one_rank_then_one_process_goes_on(tmp_path, tiny_data, layout):
    path = write_stage(tmp_path, tiny_data, parallel=layout, train={"tokens": 500 * 64, "eval_interval": 500})
    folder = RunFolder(tmp_path / "runs" / "stage")
    with start("train", path, ranks=2) as launcher:
        wait_for_step(folder, 3, launcher)
        os.kill(rank_process(launcher.pid, rank=1), signal.SIGTERM)
        out, err = launcher.communicate(timeout=240)
    assert "stop signal received: saved at step" in out, err
    # torchrun's own summary names each rank's exit code.
    assert set(re.findall(r"exitcode *: (-?\d+)", err)) == {str(int(ExitCode.SAVED_AND_STOPPED))}
    step = int((folder.checkpoints / "latest").read_text().removeprefix("step-"))
    one = ("parallel.tp=1", "parallel.pp=1", "parallel.cp=1")
    alone = run("train", path, *one, f"train.stop_at_step={step + 2}")
    assert alone.returncode == ExitCode.SAVED_AND_STOPPED, alone.stderr
    records = read_records(folder.metrics)
    assert [record["step"] for record in records if record["kind"] == "resume"] == [step]
    assert [record["step"] for record in records if record["kind"] == "train"] == list(range(1, step + 3))


def wait_for_step(folder, step, process):
    deadline = time.monotonic() + 240
    while not any(record["step"] >= step for record in read_records(folder.metrics)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def rank_process(launcher, rank):
    for child in psutil.Process(launcher).children(recursive=True):
        if child.environ().get("RANK") == str(rank):
            return child.pid
    raise AssertionError("no such rank")
