"""The whole demo, killed once on its way: minutes on one core."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_palimpsa.report.write import summaries
from megatron_palimpsa.training.metrics import read_records

COMMAND = [sys.executable, "-m", "megatron_palimpsa", "demo", "--folder"]
GIB = 2**30


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_demo_survives_a_kill_learns_in_every_stage_and_is_then_finished(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    process = subprocess.Popen([*COMMAND, str(folder)])
    metrics = folder / "long-context" / "metrics.jsonl"
    while not any(record["kind"] == "train" for record in read_records(metrics)):
        assert process.poll() is None, "the demo ended before its second stage"
        time.sleep(0.2)
    process.kill()
    assert process.wait() == -signal.SIGKILL

    assert subprocess.run([*COMMAND, str(folder)], timeout=1500).returncode == 0
    rows = summaries(folder)
    assert [row.stage for row in rows] == ["continue-pretraining", "long-context", "instruct"]
    for row in rows:
        assert row.loss_after < row.loss_before - 0.1
        assert row.peak_memory_bytes < 4 * GIB
    report = json.loads((folder / "report" / "report.json").read_text())
    assert any(sample["answer"] for sample in report["samples"])

    start = time.monotonic()
    again = subprocess.run([*COMMAND, str(folder)], capture_output=True, text=True, timeout=240)
    assert again.returncode == 0
    assert "is finished" in again.stdout
    assert time.monotonic() - start < 10
