"""`logs`: the log of the rank that matters, and with `--follow` of whatever attempt or stage comes next."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_palimpsa.config import ConfigError
from palimpsa_launch.attempts import read_text
from palimpsa_launch.log_reader import LogReader
from palimpsa_launch.runs import RunStep, read_run
from palimpsa_launch.status import statuses

_LOOK_AT_FILES = 0.5  # seconds
_ASK_SLURM = 10.0


def choose_step(steps: Sequence[RunStep], name: str | None) -> RunStep:
    """The stage of that name; without a name the first that is not complete, or the last.

    Raises:
        ConfigError: no such stage.
    """
    if name is not None:
        for step in steps:
            if step.name == name:
                return step
        raise ConfigError(f"--stage {name}: the run has {', '.join(step.name for step in steps)}")
    return next((step for step in steps if not step.is_complete), steps[-1])


def log_of(step: RunStep, rank: int | None, job_log: bool) -> Path | None:
    """The newest log: of the rank asked for, else of the one that ended badly, else of the first; None without any."""
    attempt = step.attempt
    if attempt is not None and not job_log:
        bad = attempt.bad_rank()
        path = attempt.log(rank if rank is not None else bad if bad is not None else 0)
        return path if path.exists() else None
    logs = sorted((step.folder / "logs").glob("job-*.log"), key=lambda path: path.stat().st_mtime_ns)
    return logs[-1] if logs else None


def tail(path: Path, lines: int) -> str:
    """The last so many lines."""
    return "".join(read_text(path).splitlines(keepends=True)[-lines:]) if lines else ""


def follow(
    run: Path, name: str | None, rank: int | None, job_log: bool, lines: int, write: Callable[[str], None]
) -> None:
    """Write what is logged until the run, or the stage of that name, has come to its end or waits for nobody."""
    log: LogReader | None = None
    steps = read_run(run)
    asked = time.monotonic()
    while True:
        step = choose_step(steps, name)
        path = log_of(step, rank, job_log)
        if path is not None and (log is None or path != log.path):
            if log is not None:
                log.write_rest(write)
            write(f"==> {path} <==\n")
            # Of the first file only the last lines are of interest.
            log = LogReader(path, path.stat().st_size - len(tail(path, lines).encode()) if log is None else 0)
        if log is not None:
            log.write_rest(write)
        goes_on = _goes_on(step)
        if not goes_on or time.monotonic() - asked > _ASK_SLURM:
            steps = read_run(run)
            asked = time.monotonic()
        if not goes_on and not _goes_on(choose_step(steps, name)):
            status = next(status for status in statuses(steps) if status.step.name == step.name)
            write(f"==> {step.name} is {status.state}{': ' if status.why else ''}{status.why}\n")
            return
        time.sleep(_LOOK_AT_FILES)


def _goes_on(step: RunStep) -> bool:
    """Whether something may still be logged."""
    return not step.is_complete and (bool(step.alive) or step.is_training_here)
