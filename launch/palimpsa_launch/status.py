"""`status`: a run's steps as a table, and why those that failed did."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.training.console import clock, short_count
from megatron_palimpsa.training.run_folder import RunFolder
from palimpsa_launch import preparation, slurm
from palimpsa_launch.attempts import Attempt, last_words, read_text
from palimpsa_launch.runs import RunStep

_HEADER = ("stage", "state", "job", "step", "loss", "tokens/s", "left")


@dataclass(frozen=True)
class StepStatus:
    """One step of a run."""

    step: RunStep
    state: str
    """complete, running, waiting, failed, stopped (asked to, or its process ended), cancelled or not started."""
    why: str = ""
    """What stands behind the state, in words; "" where there is nothing to say."""

    @property
    def is_bad(self) -> bool:
        return self.state in ("failed", "cancelled")


def statuses(steps: Sequence[RunStep]) -> list[StepStatus]:
    """Of a run's steps in order."""
    forgotten = [
        job
        for step in steps
        if step.submission and not step.is_complete
        for name, job in step.submission.jobs.items()
        if name not in step.queued
    ]
    ended = slurm.ended_states(forgotten)
    found: list[StepStatus] = []
    for step in steps:
        found.append(_status(step, found, ended))
    return found


def table(found: Sequence[StepStatus]) -> str:
    """A line a step, then a line for each that has a reason for its state."""
    rows = [_HEADER, *(_cells(status) for status in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    reasons = [f"{status.step.name}: {status.why}" for status in found if status.why]
    return "\n".join([*lines, *([""] if reasons else []), *reasons])


def _status(step: RunStep, before: Sequence[StepStatus], ended: dict[str, str]) -> StepStatus:
    if step.is_complete:
        return StepStatus(step, "complete", _evaluation(step))
    if step.submission is None:
        if step.is_training_here:
            return StepStatus(step, "running", "on this machine")
        return StepStatus(step, "stopped", _last_error(step) or "the same train command goes on from its checkpoint")
    main = step.main
    if main is not None and main.is_running:
        return StepStatus(step, "running")
    if main is not None and main.is_alive:
        requeued = "requeued; " if _attempt(step) is not None else ""
        return StepStatus(step, "waiting", f"{requeued}SLURM says {main.reason}" + _after(main.reason, before))
    if not step.submission.is_whole:
        return StepStatus(step, "stopped", "its submit was cut short; megatron-palimpsa resume goes on")
    return _ended(step, before, _end_state(step, ended))


def _end_state(step: RunStep, ended: dict[str, str]) -> str:
    """How SLURM says that a step ended: what failed counts, not what fell with it; "" where it says nothing."""
    assert step.submission is not None
    states = {
        job: step.queued[name].state if name in step.queued else ended.get(job, "")
        for name, job in step.submission.jobs.items()
        if name != "evaluation"
    }
    failed = [state for state in states.values() if state not in ("", "COMPLETED", "CANCELLED")]
    return failed[0] if failed else states.get(step.submission.job_id or "", "")


def _ended(step: RunStep, before: Sequence[StepStatus], state: str) -> StepStatus:
    """Of a step that has no job any more and is not complete."""
    logs = _job_logs(step)
    blocked = next((status for status in before if status.state != "complete"), None)
    if not logs and blocked is not None:
        return StepStatus(step, "cancelled", f"never started, because {blocked.step.name} {blocked.state}")
    said = next((words for log in logs if (words := last_words(log)) and words != "done"), "")
    slurm_says = f"SLURM says {state}" if state else ""
    reasons = [part for part in (slurm_says, said, _last_error(step) or "") if part]
    if state == "CANCELLED" or "told to end" in said:
        return StepStatus(step, "stopped", "; ".join([*reasons, "megatron-palimpsa resume goes on"]))
    return StepStatus(step, "failed", "; ".join(reasons) or f"no word of why; see {step.folder / 'logs'}")


def _after(reason: str, before: Sequence[StepStatus]) -> str:
    if reason != "Dependency" or not before:
        return ""
    return f" on {before[-1].step.name}"


def _evaluation(step: RunStep) -> str:
    config = step.config
    if not isinstance(config, StageConfig) or config.evaluation is None:
        return ""
    if RunFolder(step.folder).is_evaluated:
        return "evaluated"
    job = step.queued.get("evaluation")
    if job is not None and job.is_alive:
        return f"its evaluation is {job.state.lower()}"
    return f"its evaluation has not come to its end; see {step.folder / 'logs'}"


def _job_logs(step: RunStep) -> list[Path]:
    """Of the jobs submitted last, the newest first."""
    assert step.submission is not None
    found = [
        path
        for name, job in step.submission.jobs.items()
        if name != "evaluation"
        for pattern in (f"job-{job}.log", f"job-{job}_*.log")
        for path in (step.folder / "logs").glob(pattern)
    ]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def _attempt(step: RunStep) -> Attempt | None:
    """The newest, unless it is of jobs submitted before."""
    attempt = step.attempt
    if attempt is None or step.submission is None or attempt.job is None:
        return attempt
    return attempt if attempt.job in step.submission.jobs.values() else None


def _last_error(step: RunStep) -> str | None:
    attempt = _attempt(step)
    if attempt is not None:
        return attempt.last_error()
    if step.submission is None:
        return None
    for log in _job_logs(step):
        _, found, error = read_text(log).rpartition("megatron-palimpsa: error: ")
        if found:
            lines = itertools.takewhile(_is_of_message, error.splitlines())
            return " ".join(line.strip() for line in lines)
    return None


def _is_of_message(line: str) -> bool:
    """A message of several lines ends where srun or the batch script goes on."""
    return bool(line.strip()) and not line.startswith("srun: ") and " launch: " not in line


def _cells(status: StepStatus) -> tuple[str, ...]:
    step = status.step
    return (step.name, status.state, _job(step), *_progress(step, status.state))


def _job(step: RunStep) -> str:
    if step.submission is None or step.is_complete:
        return "-"
    main = step.main
    place = f" on {main.nodes}" if main is not None and main.is_running else ""
    return f"{_identifier(step)}{place}"


def _identifier(step: RunStep) -> str:
    """Of what runs now, or will next: a preparation's arrays come before its last job."""
    assert step.submission is not None
    names = [name for name, job in step.alive.items() if job.is_running] or [step.submission.main]
    return ",".join(step.submission.jobs[name] for name in names if name in step.submission.jobs)


def _progress(step: RunStep, state: str) -> tuple[str, str, str, str]:
    if not isinstance(step.config, StageConfig):
        made, shards = preparation.progress(step.config)
        return f"{made:,}/{shards:,}" if shards else "-", "-", "-", "-"
    total, record = step.config.total_steps, step.last_record()
    if record is None:
        return f"0/{total:,}", "-", "-", "-"
    rate, loss, done = record.get("tokens_per_second"), record.get("loss"), record["step"]
    left = (total - done) * step.config.train.global_batch_tokens
    return (
        f"{done:,}/{total:,}",
        "-" if loss is None else f"{loss:.4f}",
        "-" if not rate else short_count(rate),
        clock(left / rate) if rate and state == "running" else "-",
    )
