"""A run as its folder shows it: its steps in order, how far each has come, and what SLURM says of its jobs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_palimpsa.config import ConfigError, StageConfig, load_stage
from megatron_palimpsa.training.metrics import read_records
from megatron_palimpsa.training.run_folder import RunFolder
from palimpsa_launch import preparation, slurm
from palimpsa_launch.attempts import Attempt, newest_attempt
from palimpsa_launch.preparation import Preparation
from palimpsa_launch.render import job_name
from palimpsa_launch.submission import Submission, read_submission

RUNS = Path("runs")


@dataclass(frozen=True)
class RunStep:
    """A stage or a preparation of a run."""

    name: str
    folder: Path
    config: StageConfig | Preparation
    submission: Submission | None
    """None for one that was never submitted: it runs, or ran, on this machine."""
    queued: dict[str, slurm.QueuedJob] = field(default_factory=dict)
    """What SLURM still knows of its jobs, by their names."""

    @property
    def is_complete(self) -> bool:
        if isinstance(self.config, Preparation):
            return preparation.is_complete(self.config)
        return RunFolder(self.folder).read_marker() is not None

    @property
    def alive(self) -> dict[str, slurm.QueuedJob]:
        """Jobs that wait or run."""
        return {name: job for name, job in self.queued.items() if job.is_alive}

    @property
    def main(self) -> slurm.QueuedJob | None:
        """The job that the next step waits for, or one that this waits for, as far as it is in the queue."""
        if self.submission is None:
            return None
        own = [job for name, job in self.alive.items() if name != "evaluation"]
        running = [job for job in own if job.is_running]
        return next(iter([*running, *own]), None) or self.queued.get(self.submission.main)

    @property
    def is_training_here(self) -> bool:
        return RunFolder(self.folder).is_locked()

    @property
    def attempt(self) -> Attempt | None:
        return newest_attempt(self.folder)

    def last_record(self) -> dict[str, Any] | None:
        """The newest `train` record."""
        records = [record for record in read_records(RunFolder(self.folder).metrics) if record["kind"] == "train"]
        return records[-1] if records else None


def find_run(name: str) -> Path:
    """The folder of a run: a path, or a name below runs/.

    Raises:
        ConfigError: there is none; names those that are there.
    """
    for folder in (RUNS / name, Path(name)):
        if folder.is_dir() and _step_folders(folder):
            return folder
    there = sorted(folder.name for folder in RUNS.iterdir() if _step_folders(folder)) if RUNS.is_dir() else []
    raise ConfigError(
        f"{name}: no run has that name or folder; {RUNS}/ holds {', '.join(there) or 'none'} "
        f"(paths start at {Path.cwd()})"
    )


@contextlib.contextmanager
def found_run(name: str) -> Iterator[Path]:
    """`find_run`; as long as the context lasts, the working folder is the one that the run was submitted from.

    What the run's configurations name by relative paths is found from there alone. Where that folder is gone the
    working folder stays: jobs can still be cancelled.
    """
    run = find_run(name)
    submissions = [read_submission(folder) for folder in _step_folders(run)]
    noted = [(item.submitted, item.working_folder) for item in submissions if item and item.working_folder]
    place = Path(max(noted)[1]) if noted else Path.cwd()
    if place == Path.cwd() or not place.is_dir():
        yield run
        return
    run = run.absolute()
    with contextlib.chdir(place):
        yield run


def read_run(folder: Path) -> list[RunStep]:
    """The run's steps in order, with what SLURM says of them.

    Raises:
        ConfigError: a file of the run, or SLURM's queue, cannot be read.
    """
    steps = [_read_step(path) for path in _step_folders(folder)]
    jobs = {job for step in steps if step.submission for job in step.submission.jobs.values()}
    queued = slurm.queue(sorted(jobs)) if jobs else {}
    known = [
        RunStep(
            step.name,
            step.folder,
            step.config,
            step.submission,
            {name: queued[job] for name, job in step.submission.jobs.items() if job in queued},
        )
        if step.submission
        else step
        for step in steps
    ]
    return sorted(known, key=_order)


def _order(step: RunStep) -> tuple[int, Any]:
    if step.submission is None:  # before those that were submitted: they were complete by then
        return 0, configuration(step).stat().st_mtime
    return 1, step.submission.order


def _step_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in sorted(folder.iterdir()) if _configuration(path) is not None]


def _configuration(folder: Path) -> Path | None:
    """The file with which a step's jobs work."""
    candidates = [folder / "job" / "stage.yaml", folder / "job" / "prep.yaml", folder / "config.yaml"]
    return next((path for path in candidates if path.is_file()), None)


def configuration(step: RunStep) -> Path:
    """The file with which the step's jobs work."""
    path = _configuration(step.folder)
    if path is None:
        raise ConfigError(f"{step.folder}: its configuration is gone")
    return path


def _read_step(folder: Path) -> RunStep:
    path = _configuration(folder)
    assert path is not None
    config = preparation.load(path, []) if path.name == "prep.yaml" else load_stage(path)
    return RunStep(folder.name, folder, config, read_jobs(folder))


def read_jobs(folder: Path) -> Submission | None:
    """`read_submission`, with the jobs that a submit which was killed had no time to note.

    Raises:
        ConfigError: the file, or SLURM's queue, cannot be read.
    """
    submission = read_submission(folder)
    if submission is None or submission.is_whole:
        return submission
    base = job_name(str(folder.parent), folder.name)
    found = {}
    for identifier, name in slurm.jobs_of(folder).items():
        short = submission.main if name == base else name.removeprefix(f"{base}.")
        found[short] = identifier
    return dataclasses.replace(submission, jobs={**found, **submission.jobs})
