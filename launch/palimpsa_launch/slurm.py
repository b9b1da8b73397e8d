"""SLURM's commands, called without a shell."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence

from megatron_palimpsa.config import ConfigError

_PATIENCE = 120.0  # seconds; a busy controller may take its time


def check_submission(script: str) -> None:
    """Let sbatch check partition, account, QOS, constraint, size and time limit; nothing is submitted.

    Raises:
        ConfigError: with sbatch's own message.
    """
    _sbatch(["--test-only"], script)


def submit(script: str, after: str | None) -> str:
    """Submit a batch script, to start once the job `after` has ended with 0; -> the job's id.

    Raises:
        ConfigError: with sbatch's own message.
    """
    dependency = [] if after is None else [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"]
    answer = _sbatch(["--parsable", *dependency], script)
    job = answer.strip().split(";")[0]
    if not job.isdecimal():
        raise ConfigError(f"sbatch answered {answer!r} instead of a job id")
    return job


def cancel(job: str) -> None:
    _call(["scancel", job])


def state(job: str) -> str | None:
    """What squeue says of a job, such as RUNNING; None where it is no longer in the queue.

    Raises:
        ConfigError: the queue cannot be read.
    """
    answer = _call(["squeue", "--noheader", f"--jobs={job}", "--format=%T"])
    if answer.returncode and "Invalid job id" not in answer.stderr:
        raise ConfigError(f"squeue: {_message(answer.stderr)}")
    found = answer.stdout.strip()
    return found if found and found not in _ENDED else None


_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "DEADLINE", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"}


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
            command, input=text, env=environment, capture_output=True, text=True, check=False, timeout=_PATIENCE
        )
    except FileNotFoundError:
        raise ConfigError(f"{command[0]} is not on PATH: submit on a machine that has SLURM's commands") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{command[0]} has not answered for {_PATIENCE:.0f} s") from None
