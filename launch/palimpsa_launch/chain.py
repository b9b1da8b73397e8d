"""A chain of stages as it would be submitted: every stage checked against its job, with its script and its plan.

SLURM does not look into a job. Whatever would stop a stage minutes or days later in the queue is refused here, with one
message. Nothing is written and nothing here needs torch.
"""

from __future__ import annotations

import os
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_palimpsa.config import ConfigError, StageConfig, load_stage
from megatron_palimpsa.training import run
from megatron_palimpsa.training.console import clock
from megatron_palimpsa.training.metrics import read_records
from megatron_palimpsa.training.run_folder import RunFolder
from megatron_palimpsa.training.stages import planned_source
from palimpsa_launch.job import JobConfig
from palimpsa_launch.render import render_stage


@dataclass(frozen=True)
class PlannedStage:
    """A stage of the chain."""

    config: StageConfig
    folder: Path
    """Of the stage, absolute."""
    is_complete: bool
    """Then there is nothing to do, and neither a plan nor a script."""
    plan: str = ""
    script: str = ""

    @property
    def job_folder(self) -> Path:
        """Where what was submitted is kept."""
        return self.folder / "job"

    @property
    def resolved(self) -> Path:
        """The configuration that the job trains with: the recipe may change while the job waits."""
        return self.job_folder / "stage.yaml"


def plan_chain(recipes: Sequence[Path], overrides: list[str], job: JobConfig) -> list[PlannedStage]:
    """Check the stages in the order in which they are trained and render what is left to do.

    Raises:
        ConfigError: names the recipe, what is wrong and what to do.
    """
    _check_environment(job)
    configs = [load_stage(recipe, overrides) for recipe in recipes]
    planned = []
    for number, (recipe, config) in enumerate(zip(recipes, configs, strict=True)):
        for other, before in zip(recipes, configs[:number], strict=False):
            if before.folder.resolve() == config.folder.resolve():
                raise ConfigError(f"{other} and {recipe} both train into {config.folder}")
        try:
            planned.append(_plan_stage(config, configs[:number], job))
        except ConfigError as error:
            raise ConfigError(f"{recipe}: {error}") from None
    return planned


def _plan_stage(config: StageConfig, before: list[StageConfig], job: JobConfig) -> PlannedStage:
    run_folder = RunFolder(config.folder)
    folder = Path.cwd() / config.folder
    if run_folder.read_marker() is not None:
        run_folder.check_config(config)
        return PlannedStage(config, folder, is_complete=True)
    waited_for = [stage for stage in before if RunFolder(stage.folder).read_marker() is None]
    source = planned_source(config, waited_for)
    try:
        plan = run.describe(config, job.ranks, planned_source=source)
    except ConfigError as error:
        raise ConfigError(f"{error} (job: {job.nodes} nodes x {job.ranks_per_node} processes)") from None
    _check_interval(config, run_folder, job)
    stage = PlannedStage(config, folder, is_complete=False, plan=plan)
    script = render_stage(job, config.name, folder, Path.cwd(), ["train", str(stage.resolved)])
    _check_syntax(script)
    return PlannedStage(config, folder, is_complete=False, plan=plan, script=script)


def _check_environment(job: JobConfig) -> None:
    if job.container is None:
        if not os.access(job.interpreter, os.X_OK) or Path(job.interpreter).is_dir():
            raise ConfigError(f"python={job.interpreter!r} is not a program here; name the interpreter of a .venv")
        return
    image = job.container.image
    if job.container.engine == "apptainer" and "://" not in image and not Path(image).exists():
        raise ConfigError(f"container.image={image!r} is not there; name a .sif file, a folder or a URI")
    for mount in job.container.mounts:
        if not Path(mount.split(":")[0]).exists():
            raise ConfigError(f"container.mounts: {mount.split(':')[0]!r} is not there")


def _check_interval(config: StageConfig, folder: RunFolder, job: JobConfig) -> None:
    """A lost node must not cost a whole attempt; how long a step takes is known once some were taken."""
    records = [record for record in read_records(folder.metrics) if record["kind"] == "train"][-5:]
    rates = [record["tokens_per_second"] for record in records if record.get("tokens_per_second")]
    if not rates:
        return
    seconds = config.train.global_batch_tokens / statistics.median(rates)
    interval, usable = config.checkpoint.interval, job.seconds - job.save_seconds
    if interval * seconds > usable:
        raise ConfigError(
            f"checkpoint.interval={interval} steps take {clock(interval * seconds)} at the {seconds:.3g} s a step of "
            f"this run so far, but an attempt has {clock(usable)} (time={job.time} less save_seconds): "
            f"set checkpoint.interval to {max(1, int(usable / seconds / 2))} or less"
        )


def _check_syntax(script: str) -> None:
    try:
        answer = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError("bash is not on PATH: batch scripts need it") from None
    if answer.returncode:
        raise ConfigError(f"the batch script has a syntax error: {answer.stderr.strip()}")
