"""The tests' own SLURM leaves nothing behind, however the process that started it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.mini_slurm import reason_to_skip, wait_until

_PROGRAM = """
import sys, time
from helpers.mini_slurm import mini_slurm, reason_to_skip
reason_to_skip()
with mini_slurm(1) as cluster:
    cluster.call("sbatch", "--output=/dev/null", "--wrap=sleep 1000")
    while "R" not in cluster.call("squeue", "-h", "-o%t"):
        time.sleep(0.1)
    print(cluster.folder, flush=True)
    time.sleep(1000)
"""


def processes_of(folder: str) -> list[str]:
    """Command lines of what was started for the folder, in whatever namespace."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            text = (path / "cmdline").read_text() + (path / "environ").read_text()
        except OSError:  # it has just ended
            continue
        if folder in text:
            found.append(text.split("\0")[0])
    return found


def test_nothing_outlives_a_process_that_is_killed():
    if reason := reason_to_skip():
        pytest.skip(reason)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", _PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        folder = process.stdout.readline().strip()
        assert {"slurmctld", "munged"} <= set(processes_of(folder))
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_until("the end of its processes", lambda: not processes_of(folder), 30)
        wait_until("the end of its folder", lambda: not Path(folder).exists(), 30)
