"""Submit a chain of stages: each starts once the one before it is complete, and is cancelled where that one failed."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

import megatron_palimpsa
from megatron_palimpsa.config import ConfigError, save_resolved
from palimpsa_launch import slurm
from palimpsa_launch.chain import PlannedStage
from palimpsa_launch.job import JobConfig


def submit_chain(stages: Sequence[PlannedStage], job: JobConfig) -> dict[str, str]:
    """Submit the stages that are not complete; -> job ids by stage.

    A stage's folder keeps what was submitted under `job/`: script, resolved configuration, job description and
    `submission.json` with the job's id and the git commit. Either all are submitted or none.

    Raises:
        ConfigError: a stage has a job already, or sbatch refuses one.
    """
    left = [stage for stage in stages if not stage.is_complete]
    for stage in left:
        _check_no_job(stage)
        slurm.check_submission(stage.script)
    submitted: dict[str, str] = {}
    try:
        after = None
        for stage in left:
            _write(stage, job)
            after = slurm.submit(stage.script, after)
            submitted[stage.config.name] = after
            record = {"job_id": after, "submitted": datetime.now(UTC).isoformat(timespec="seconds"), **_commit()}
            _replace(_record(stage), json.dumps(record, indent=2) + "\n")
    except BaseException:
        for identifier in submitted.values():
            slurm.cancel(identifier)
        raise
    return submitted


def _record(stage: PlannedStage) -> Path:
    return stage.job_folder / "submission.json"


def _check_no_job(stage: PlannedStage) -> None:
    try:
        identifier = str(json.loads(_record(stage).read_text())["job_id"])
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{_record(stage)} cannot be read ({error}); see squeue, and remove it") from None
    if (state := slurm.state(identifier)) is not None:
        raise ConfigError(
            f"{stage.folder} has job {identifier} ({state}) already; let it go on, or end it with scancel {identifier}"
        )


def _write(stage: PlannedStage, job: JobConfig) -> None:
    # sbatch does not look whether the log's folder exists, and without it the job ends at once.
    (stage.folder / "logs").mkdir(parents=True, exist_ok=True)
    stage.job_folder.mkdir(exist_ok=True)
    (stage.job_folder / "attempts").unlink(missing_ok=True)
    temporary = stage.resolved.with_name(".stage.yaml.tmp")
    save_resolved(stage.config, temporary)
    temporary.replace(stage.resolved)
    _replace(stage.job_folder / "job.yaml", yaml.safe_dump(dataclasses.asdict(job), sort_keys=False))
    _replace(stage.job_folder / "job.sh", stage.script)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


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
