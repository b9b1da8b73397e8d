"""`cancel`, `save-now` and `resume`: what is done to a run that was submitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.training.run_folder import RunFolder
from palimpsa_launch import slurm
from palimpsa_launch.chain import PlannedStep, plan_chain
from palimpsa_launch.job import load_job
from palimpsa_launch.preparation import Preparation
from palimpsa_launch.runs import RunStep, configuration


def cancel(steps: Sequence[RunStep], *, at_once: bool) -> list[str]:
    """End every job of a run; a stage that trains saves first, unless it is to end at once. -> what was done, in words.

    Raises:
        ConfigError: none of its jobs waits or runs.
    """
    done, waiting = [], []
    for step in reversed(steps):  # the last first: none may start because another has gone
        for name, job in step.alive.items():
            assert step.submission is not None
            identifier = step.submission.jobs[name]
            if job.is_running and name == "train" and not at_once:
                slurm.ask_to_stop(identifier)
                done.append(f"{step.name}: job {identifier} saves and stops")
            else:
                waiting.append(identifier)
                done.append(f"{step.name}: job {identifier} ({name}) is cancelled")
    slurm.cancel(waiting)
    if not done:
        raise ConfigError("no job of the run waits or runs: there is nothing to cancel")
    return done


def save_now(steps: Sequence[RunStep]) -> RunStep:
    """Ask the stage that trains for a checkpoint after its next step; -> the stage.

    Raises:
        ConfigError: none trains.
    """
    for step in steps:
        if step.is_complete or isinstance(step.config, Preparation):
            continue
        if step.is_training_here or (step.main is not None and step.main.is_running):
            RunFolder(step.folder).save_now.touch()
            return step
    raise ConfigError("no stage of the run is training: there is nothing to save")


def plan_rest(run: Path, steps: Sequence[RunStep], changes: Mapping[str, Any]) -> list[PlannedStep]:
    """What is left of a run, with the configurations and jobs that were recorded when it was submitted.

    Args:
        changes: of the jobs' settings.

    Raises:
        ConfigError: a job of the run is alive, it was never submitted, or its paths do not lead to it from here.
    """
    for step in steps:
        for name, job in step.alive.items():
            assert step.submission is not None
            raise ConfigError(
                f"{step.name} has job {step.submission.jobs[name]} ({job.state}): the run goes on by itself; "
                f"to change it, end it first with megatron-palimpsa cancel {run}"
            )
    submitted = [step for step in steps if step.submission is not None]
    if not submitted:
        raise ConfigError(f"{run} was never submitted: the train or submit command that began it goes on with it")
    for step in submitted:
        _check_place(step)
    jobs = [load_job(step.folder / "job" / "job.yaml", changes) for step in submitted]
    return plan_chain([configuration(step) for step in submitted], [], jobs)


def _check_place(step: RunStep) -> None:
    """Refuse to go on with a step whose relative paths mean something else here: that would be another run."""
    assert step.submission is not None
    place = step.submission.working_folder
    if place is not None and Path(place).resolve() != Path.cwd().resolve():
        reason = "call it from there" if Path(place).is_dir() else "that folder is gone, and its paths start there"
        raise ConfigError(f"{step.folder} was submitted from {place}: {reason}")
    folder = step.config.folder
    if folder.resolve() != step.folder.resolve():
        raise ConfigError(
            f"{step.folder}: its configuration trains into {folder}, which is {folder.resolve()} seen from "
            f"{Path.cwd()}: call it from the folder that it was submitted from, or move the run back"
        )
