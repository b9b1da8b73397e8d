"""SLURM's commands, called without a shell."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_palimpsa.config import ConfigError

_PATIENCE = 120.0  # seconds; a busy controller may take its time
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "DEADLINE", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"}


@dataclass(frozen=True)
class QueuedJob:
    """What squeue says of a job; of an array, of the task that is furthest."""

    state: str
    """Such as RUNNING."""
    reason: str
    """Why it waits, such as Dependency; the word None while it runs."""
    nodes: str

    @property
    def is_alive(self) -> bool:
        return self.state not in _ENDED

    @property
    def is_running(self) -> bool:
        return self.state == "RUNNING"


def check_submission(script: str, partition: str | None) -> None:
    """Let sbatch check partition, account, QOS, constraint, size and time limit; nothing is submitted.

    Raises:
        ConfigError: with sbatch's own message, and what the partition has where too much was asked of it.
    """
    try:
        _sbatch(["--test-only"], script)
    except ConfigError as error:
        too_much = re.search(r"[Nn]ode|generic resource|processors|CPU|[Mm]emory", str(error))
        raise ConfigError(f"{error}{_offer(partition) if too_much else ''}") from None


def submit(script: str, after: Sequence[str], *, array: str | None = None) -> str:
    """Submit a batch script, to start once the jobs `after` have ended with 0; -> the job's id.

    A job that is no array also waits for every job of the same name, so that no two of them ever run side by side.

    Args:
        array: task numbers, such as 0-99 or 3,17.

    Raises:
        ConfigError: with sbatch's own message.
    """
    wait_for = [f"afterok:{':'.join(after)}"] if after else []
    options = ["--kill-on-invalid-dep=yes"] if after else []
    if array is None:
        wait_for.append("singleton")
    else:
        options.append(f"--array={array}")
    dependency = [f"--dependency={','.join(wait_for)}"] if wait_for else []
    answer = _sbatch(["--parsable", *dependency, *options], script)
    job = answer.strip().split(";")[0]
    if not job.isdecimal():
        raise ConfigError(f"sbatch answered {answer!r} instead of a job id")
    return job


def cancel(jobs: Sequence[str]) -> None:
    """End jobs, waiting or running; those that have ended are passed over."""
    if jobs:
        _call(["scancel", *jobs])


def ask_to_stop(job: str) -> None:
    """Send SIGTERM to the batch script alone, which lets its processes save."""
    _call(["scancel", "--batch", "--signal=TERM", job])


def queue(jobs: Sequence[str]) -> dict[str, QueuedJob]:
    """What squeue knows of the jobs, by id; those it has forgotten are left out.

    Raises:
        ConfigError: the queue cannot be read.
    """
    if not jobs:
        return {}
    answer = _call(
        ["squeue", "--noheader", "--states=all", "--array", f"--jobs={','.join(jobs)}", "--format=%F|%T|%r|%N"]
    )
    if answer.returncode and "Invalid job id" not in answer.stderr:
        raise ConfigError(f"squeue: {_message(answer.stderr)}")
    found: dict[str, QueuedJob] = {}
    for line in answer.stdout.splitlines():
        job, state, reason, nodes = line.split("|", 3)
        task = QueuedJob(state, reason, nodes)
        if job not in found or _rank(task) > _rank(found[job]):
            found[job] = task
    return found


def jobs_of(folder: Path) -> dict[str, str]:
    """This user's jobs that wait or run and have the folder as their comment; -> names by id.

    Raises:
        ConfigError: the queue cannot be read.
    """
    answer = _call(["squeue", "--noheader", f"--user={os.getuid()}", "--format=%F|%j|%k"])
    if answer.returncode:
        raise ConfigError(f"squeue: {_message(answer.stderr)}")
    lines = (line.split("|", 2) for line in answer.stdout.splitlines() if line.count("|") >= 2)
    wanted = folder.resolve()
    return {job: name for job, name, comment in lines if comment[:1] == "/" and Path(comment).resolve() == wanted}


def ended_states(jobs: Sequence[str]) -> dict[str, str]:
    """How jobs ended that squeue has forgotten, by id, where the cluster keeps accounts; else nothing."""
    if not jobs:
        return {}
    answer = _call(
        ["sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={','.join(jobs)}", "--format=JobIDRaw,State"]
    )
    if answer.returncode:
        return {}
    lines = (line.split("|", 1) for line in answer.stdout.splitlines() if "|" in line)
    return {job: state.split()[0] for job, state in lines if state}


def _rank(job: QueuedJob) -> int:
    """Running before waiting before failed before completed: the state of an array of many tasks."""
    return 3 if job.is_running else 2 if job.is_alive else 0 if job.state == "COMPLETED" else 1


def _offer(partition: str | None) -> str:
    """What a partition's nodes have, in words; "" where sinfo does not say."""
    named = [f"--partition={partition}"] if partition else []
    answer = _call(["sinfo", "--noheader", *named, "--format=%P|%D|%c|%G"])
    lines = [line.split("|") for line in answer.stdout.splitlines() if line.count("|") == 3]
    kinds = [
        f"{name.rstrip('*')} has {nodes} nodes of {cores} cores and {'no GPUs' if gpus == '(null)' else gpus}"
        for name, nodes, cores, gpus in lines
        if partition or name.endswith("*")
    ]
    return f"; {', '.join(kinds)}" if kinds else ""


def _sbatch(options: Sequence[str], script: str) -> str:
    answer = _call(["sbatch", *options], script)
    if answer.returncode:
        raise ConfigError(f"sbatch refuses the job: {_message(answer.stderr)}")
    return answer.stdout


def _message(errors: str) -> str:
    lines = [re.sub(r"^\w+: (error: )?", "", line) for line in errors.splitlines() if line.strip()]
    return "; ".join(lines) or "no reason given"


def _call(command: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    # SBATCH_* would go over the script's own lines; SLURM_* of a job that this runs in would reach the new one.
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SBATCH_", "SLURM_")) or key == "SLURM_CONF"
    }
    try:
        return subprocess.run(
            command,
            input=text,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE,
            start_new_session=True,  # Ctrl-C is for this process: sbatch would end without the id of what it submitted
        )
    except FileNotFoundError:
        raise ConfigError(f"{command[0]} is not on PATH: this needs a machine that has SLURM's commands") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{command[0]} has not answered for {_PATIENCE:.0f} s") from None
