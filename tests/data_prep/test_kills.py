"""SIGKILL at any moment of a job, then the same job again: the same bytes, nothing left over."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.jobs import content, die_at, fineweb_job, killed, write_inputs
from palimpsa_data import DataError
from palimpsa_data.jobs import run_job
from palimpsa_data.plan import PrepJob
from palimpsa_data.shards import check_shard, manifest_path

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def check_what_counts(job: PrepJob) -> None:
    """Every shard with a manifest is whole."""
    for path in job.output.glob("*.manifest.json"):
        check_shard(path.with_name(path.name.removesuffix(".manifest.json")), checksums=True)


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.long)], ids=["every fifth", "every"])
def test_killed_at_every_step_of_a_job(tmp_path: Path, stride: int) -> None:
    write_inputs(tmp_path / "in", files=1, rows=12)
    run_job(fineweb_job(tmp_path, "expected/set"))
    job = fineweb_job(tmp_path, "now/set")
    expected = content(tmp_path / "expected/set")
    kills = 0
    for call in range(1, 200, stride):
        shutil.rmtree(tmp_path / "now", ignore_errors=True)
        if not killed(die_at, call, lambda: run_job(job)):
            break
        kills += 1
        check_what_counts(job)
        run_job(job)
        assert content(job.output) == expected, call
    assert kills > 40 / stride
    assert content(job.output) == expected


def test_killed_again_and_again_without_a_rerun_between(tmp_path: Path) -> None:
    """What one kill leaves is what the next call finds."""
    write_inputs(tmp_path / "in", files=2, rows=12)
    run_job(fineweb_job(tmp_path, "expected/set"))
    job = fineweb_job(tmp_path, "now/set")
    draw = random.Random(3)
    for _ in range(15):
        killed(die_at, draw.randint(1, 60), lambda: run_job(job))
        check_what_counts(job)
    run_job(job)
    assert content(job.output) == content(tmp_path / "expected/set")


@pytest.mark.parametrize("moments", [4, pytest.param(100, marks=pytest.mark.long)], ids=["a few", "all"])
def test_killed_at_random_moments(tmp_path: Path, moments: int) -> None:
    write_inputs(tmp_path / "in", files=2, rows=1500)
    unbroken = fineweb_job(tmp_path, "expected/set")
    start = time.monotonic()
    assert not killed(run_job, unbroken)
    duration = time.monotonic() - start
    job = fineweb_job(tmp_path, "now/set")
    expected = content(tmp_path / "expected/set")
    draw = random.Random(moments)
    kills = 0
    for _ in range(10 * moments):
        shutil.rmtree(tmp_path / "now", ignore_errors=True)
        kills += killed(run_job, job, after=draw.uniform(0, duration))
        check_what_counts(job)
        run_job(job)
        assert content(job.output) == expected
        if kills == moments:
            return
    raise AssertionError(f"the job came to its end too often: {kills} kills")


def command(folder: Path, output: Path) -> list[str]:
    flags = ["--output", str(output), "--tokenizer", str(folder / "tokenizer.json"), "--processes", "2"]
    return [sys.executable, "-m", "megatron_palimpsa", "prep", "fineweb", str(folder / "in"), *flags]


def killed_command(arguments: list[str], after: float) -> bool:
    """The command's first process is killed `after` so many seconds; its workers have to end by themselves."""
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            process.wait(after)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
        return process.wait() == -signal.SIGKILL


@pytest.mark.long
def test_a_command_with_two_processes_killed_at_random_moments(tmp_path: Path) -> None:
    write_inputs(tmp_path / "in", files=4, rows=1500)
    fineweb_job(tmp_path)  # for its tokenizer
    start = time.monotonic()
    subprocess.run(command(tmp_path, tmp_path / "expected/set"), check=True, capture_output=True)
    duration = time.monotonic() - start
    draw = random.Random(10)
    kills = tries = 0
    while kills < 6:
        tries += 1
        assert tries < 40, f"{kills} kills: it ends before most of them"
        shutil.rmtree(tmp_path / "now", ignore_errors=True)
        kills += killed_command(command(tmp_path, tmp_path / "now/set"), draw.uniform(0, duration))
        subprocess.run(command(tmp_path, tmp_path / "now/set"), check=True, capture_output=True)
        assert content(tmp_path / "now/set") == content(tmp_path / "expected/set")


def full_after(writes: int, job: PrepJob) -> None:
    """The disk is full from the given write on."""
    from palimpsa_data import shard_writer

    write, done = shard_writer._HashedFile.write, 0

    def limited(self: Any, data: Any) -> None:
        nonlocal done
        done += 1
        if done > writes:
            raise OSError(28, "No space left on device")
        write(self, data)

    shard_writer._HashedFile.write = limited  # type: ignore[method-assign]
    with pytest.raises(DataError, match="No space left on device; it stays unfinished: make space, then run again"):
        run_job(job)


@pytest.mark.parametrize("writes", range(4))
def test_a_disk_that_fills_at_any_write(tmp_path: Path, writes: int) -> None:
    write_inputs(tmp_path / "in", rows=30)
    run_job(fineweb_job(tmp_path, "expected/set"))
    job = fineweb_job(tmp_path, "now/set")
    assert not killed(full_after, writes, job)
    whole = [path for path in job.output.glob("*-of-*") if path.suffix != ".json"]
    assert len(whole) == 2 * len(list(job.output.glob("*.manifest.json"))) == 2 * (writes // 2)
    check_what_counts(job)
    run_job(job)
    assert content(job.output) == content(tmp_path / "expected/set")
    assert manifest_path(job.output / "set-00001-of-00002").exists()
