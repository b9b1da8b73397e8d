"""Submit a chain of steps: each starts once the one before it is complete, and is cancelled where that one failed."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from palimpsa_data.files import write_atomically
from palimpsa_data.locks import lock

import megatron_palimpsa
from megatron_palimpsa.config import ConfigError, write_yaml
from megatron_palimpsa.lifeline import answering_signals
from palimpsa_launch import slurm
from palimpsa_launch.chain import PlannedStep, resolved_path
from palimpsa_launch.runs import read_jobs
from palimpsa_launch.submission import Submission, read_submission, remove_submission, write_submission


def submit_chain(steps: Sequence[PlannedStep]) -> dict[str, str]:
    """Submit what is left of the steps; -> job ids by `STEP` or `STEP.JOB`.

    A step's folder keeps what was submitted under `job/`: scripts, resolved configuration, job description and
    `submission.json` with the jobs' ids and the git commit. Either all are submitted or none.

    Raises:
        ConfigError: a step has a job already, or sbatch refuses one.
    """
    left = [step for step in steps if not step.is_complete]
    for step in left:
        _check_no_job(step)
        for job in step.jobs:
            slurm.check_submission(job.script, step.job.partition)
    if not left:
        return {}
    run = left[0].folder.parent
    _make_folder(run)
    # Two calls at the same moment: the second finds the first one's jobs.
    with lock(run / ".submit.lock", wait=True):
        for step in left:
            _check_no_job(step)
        return _submit(left)


def _submit(left: Sequence[PlannedStep]) -> dict[str, str]:
    submitted: dict[str, str] = {}
    previous = {step.folder: read_submission(step.folder) for step in left}
    shared = {
        "submitted": datetime.now(UTC).isoformat(timespec="seconds"),
        "working_folder": str(Path.cwd()),
        **_commit(),
    }
    received: list[int] = []
    # What would end this at once waits until sbatch has said the job's id.
    with answering_signals(lambda number, frame: received.append(number)):
        try:
            for place, step in enumerate(left):
                _write(step)
                write_submission(step.folder, Submission({}, step.main, place=place, is_whole=False, **shared))
            before: list[str] = []
            for place, step in enumerate(left):
                own: dict[str, str] = {}
                for job in step.jobs:
                    after = [own[name] for name in job.after] or before
                    own[job.name] = slurm.submit(job.script, after, array=job.array)
                    submitted[step.name if job.name == step.main else f"{step.name}.{job.name}"] = own[job.name]
                    is_whole = len(own) == len(step.jobs)
                    noted = Submission(own, step.main, place=place, is_whole=is_whole, **shared)
                    write_submission(step.folder, noted)
                    if received:
                        raise KeyboardInterrupt
                before = [own[step.main]] if step.main else before
        except BaseException:
            slurm.cancel(list(submitted.values()))
            _restore(previous)
            raise
    return submitted


def _restore(previous: Mapping[Path, Submission | None]) -> None:
    for folder, submission in previous.items():
        if submission is None:
            remove_submission(folder)
        else:
            write_submission(folder, submission)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output_dir: cannot make {folder}: {error.strerror}") from None


def _check_no_job(step: PlannedStep) -> None:
    submission = read_jobs(step.folder)
    if submission is None:
        return
    for identifier, job in slurm.queue(list(submission.jobs.values())).items():
        if job.is_alive:
            raise ConfigError(
                f"{step.folder} has job {identifier} ({job.state}) already; let it go on, or end it with "
                f"megatron-palimpsa cancel {step.folder.parent}"
            )


def _write(step: PlannedStep) -> None:
    # sbatch does not look whether the log's folder exists, and without it the job ends at once.
    (step.folder / "logs").mkdir(parents=True, exist_ok=True)
    folder = step.folder / "job"
    folder.mkdir(exist_ok=True)
    (folder / "attempts").unlink(missing_ok=True)
    write_atomically(resolved_path(step.folder, step.is_preparation), step.resolved.encode())
    settings = write_yaml(dataclasses.asdict(step.job))  # type: ignore[call-overload]
    write_atomically(folder / "job.yaml", settings.encode())
    for job in step.jobs:
        name = "job" if job.name == step.main else job.name
        write_atomically(folder / f"{name}.sh", job.script.encode())


def _commit() -> dict[str, Any]:
    """Of the code that will run, as far as it lies in a git repository."""
    folder = str(Path(megatron_palimpsa.__file__ or "").parent)
    answers = []
    for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            answer = subprocess.run(
                ["git", "-C", folder, *arguments], capture_output=True, text=True, check=False, timeout=60
            )
        except (OSError, subprocess.TimeoutExpired):
            return {"git_commit": None}
        if answer.returncode:
            return {"git_commit": None}
        answers.append(answer.stdout.strip())
    return {"git_commit": answers[0], "git_changed": bool(answers[1])}
