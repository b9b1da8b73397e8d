"""A chain of stages as it would be submitted: every stage checked against its job, with its scripts and its plan.

SLURM does not look into a job. Whatever would stop a stage minutes or days later in the queue is refused here, with one
message. Nothing is written and nothing here needs torch.
"""

from __future__ import annotations

import dataclasses
import shlex
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_palimpsa.config import ConfigError, StageConfig, load_stage, to_dict, write_yaml
from megatron_palimpsa.training import run
from megatron_palimpsa.training.console import clock
from megatron_palimpsa.training.metrics import read_records
from megatron_palimpsa.training.run_folder import RunFolder
from megatron_palimpsa.training.stages import follow_source, planned_source
from palimpsa_launch import preparation
from palimpsa_launch.job import JobConfig, check_environment
from palimpsa_launch.preparation import Preparation
from palimpsa_launch.render import check_syntax, job_name, render_stage, render_task


@dataclass(frozen=True)
class PlannedJob:
    """One SLURM job of a step."""

    name: str
    script: str
    array: str | None = None
    """Task numbers."""
    after: tuple[str, ...] = ()
    """Jobs of the same step that must have ended well; a step's first jobs wait for the step before."""


@dataclass(frozen=True)
class PlannedStep:
    """A stage or a preparation in the chain."""

    name: str
    folder: Path
    """Absolute; what was submitted is kept in `job/` below it."""
    resolved: str
    """Its configuration as YAML, which the jobs use: the recipe may change while they wait."""
    job: JobConfig
    is_preparation: bool = False
    plan: str = ""
    jobs: tuple[PlannedJob, ...] = ()
    """None where the step is complete."""
    main: str = ""
    """The job that the next step waits for; "" where only work that nothing waits for is left."""

    @property
    def is_complete(self) -> bool:
        return not self.jobs


@dataclass(frozen=True)
class Before:
    """What the steps in front of one will have done by the time it starts."""

    stages: list[StageConfig]
    """Not complete yet."""
    preparations: list[Preparation]
    """Nor these; data that they make may still be missing."""

    @classmethod
    def of(cls, left: Iterable[StageConfig | Preparation]) -> Before:
        """Of the steps that are not complete."""
        steps = list(left)
        return cls(
            [step for step in steps if isinstance(step, StageConfig)],
            [step for step in steps if isinstance(step, Preparation)],
        )


def resolved_path(folder: Path, is_preparation: bool) -> Path:
    """Where a step's jobs find its configuration."""
    return folder / "job" / ("prep.yaml" if is_preparation else "stage.yaml")


def plan_chain(recipes: Sequence[Path], overrides: list[str], jobs: Sequence[JobConfig]) -> list[PlannedStep]:
    """Check the steps in the order in which they run and render what is left to do; `jobs` has one for each recipe.

    Raises:
        ConfigError: names the recipe, what is wrong and what to do.
    """
    for job in jobs:
        check_environment(job)
    configs = [load_recipe(recipe, overrides) for recipe in recipes]
    check_folders(recipes, configs)
    planned: list[PlannedStep] = []
    for number, (recipe, config, job) in enumerate(zip(recipes, configs, jobs, strict=True)):
        try:
            left = [before for before, step in zip(configs[:number], planned, strict=True) if step.main]
            step = _plan_step(config, Before.of(left), job)
            for planned_job in step.jobs:
                check_syntax(planned_job.script)
            planned.append(step)
        except ConfigError as error:
            raise ConfigError(f"{recipe}: {error}") from None
    return planned


def load_recipe(recipe: Path, overrides: list[str]) -> StageConfig | Preparation:
    """The stage or the preparation that a recipe describes; overrides of stages leave preparations alone."""
    if preparation.is_preparation(recipe):
        return preparation.load(recipe, overrides)
    return follow_source(load_stage(recipe, overrides))


def check_folders(recipes: Sequence[Path], configs: Sequence[StageConfig | Preparation]) -> None:
    """A run is one folder with a folder for each of its steps.

    Raises:
        ConfigError: two steps share a folder, or one lies elsewhere.
    """
    for number, config in enumerate(configs):
        for other, before in zip(recipes, configs[:number], strict=False):
            if before.folder.resolve() == config.folder.resolve():
                raise ConfigError(f"{other} and {recipes[number]} both train into {config.folder}")
            if Path(before.output_dir).resolve() != Path(config.output_dir).resolve():
                raise ConfigError(
                    f"output_dir={before.output_dir!r} in {other} and {config.output_dir!r} in {recipes[number]}: "
                    f"the stages of a run have one; give output_dir=FOLDER, or start them one by one"
                )


def _plan_step(config: StageConfig | Preparation, before: Before, job: JobConfig) -> PlannedStep:
    if isinstance(config, Preparation):
        return _plan_preparation(config, preparation.job_of(config, job))
    run_folder = RunFolder(config.folder)
    step = PlannedStep(config.name, Path.cwd() / config.folder, write_yaml(to_dict(config)), job)
    if run_folder.read_marker() is not None:
        run_folder.check_config(config)
        if config.evaluation is None or run_folder.is_evaluated:
            return step
        return dataclasses.replace(step, jobs=(_evaluation(config, step, after=()),))
    plan = describe_stage(config, before, job.ranks, f"job: {job.layout}")
    _check_interval(config, run_folder, job)
    name = job_name(config.output_dir, config.name)
    command = ["train", str(resolved_path(step.folder, is_preparation=False))]
    jobs = [PlannedJob("train", render_stage(job, name, step.folder, Path.cwd(), command))]
    if config.evaluation is not None:
        jobs.append(_evaluation(config, step, after=("train",)))
    return dataclasses.replace(step, plan=plan, jobs=tuple(jobs), main="train")


def describe_stage(config: StageConfig, before: Before, ranks: int, where: str, gpu_memory: int | None = None) -> str:
    """Check a stage that follows what is `before` it and describe it.

    Raises:
        ConfigError: what is wrong, and in which layout (`where`).
    """
    made = [folder for step in before.preparations for folder in preparation.outputs(step)]
    source = planned_source(config, before.stages, made)
    prepares = bool(before.preparations)
    try:
        return run.describe(config, ranks, planned_source=source, data_may_be_missing=prepares, gpu_memory=gpu_memory)
    except ConfigError as error:
        raise ConfigError(f"{error} ({where})") from None


def _evaluation(config: StageConfig, step: PlannedStep, after: tuple[str, ...]) -> PlannedJob:
    command = evaluation_command(config, step.folder, step.job.interpreter)
    name = job_name(config.output_dir, f"{config.name}.evaluation")
    job = dataclasses.replace(step.job, nodes=1)
    marker = RunFolder(step.folder).evaluated
    return PlannedJob(
        "evaluation", render_task(job, name, step.folder, Path.cwd(), command, marker=marker), after=after
    )


def evaluation_command(config: StageConfig, folder: Path, python: str) -> list[str]:
    """The program and arguments of a stage's evaluation; `python` is the interpreter that trains.

    Raises:
        ConfigError: its quotes are not balanced.
    """
    try:
        words = shlex.split(config.evaluation or "")
    except ValueError as error:
        raise ConfigError(f"evaluation={config.evaluation!r}: {error}") from None
    return [word.replace("{folder}", str(folder)).replace("{python}", python) for word in words]


def _plan_preparation(config: Preparation, job: JobConfig) -> PlannedStep:
    folder = Path.cwd() / config.folder
    step = PlannedStep(config.name, folder, preparation.as_yaml(config), job, is_preparation=True)
    if preparation.is_complete(config):
        return step
    tasks = {array: preparation.tasks_left(config, array) for array in config.arrays}
    jobs = []
    for array, left in tasks.items():
        if left:
            words = preparation.words(config.arrays[array].command)
            command = [job.interpreter, "-m", "megatron_palimpsa", *words]
            name = job_name(config.output_dir, f"{config.name}.{array}")
            count = config.arrays[array].tasks
            script = render_task(job, name, folder, Path.cwd(), command, tasks=count)
            jobs.append(PlannedJob(array, script, array=",".join(map(str, left))))
    resolved = str(resolved_path(folder, is_preparation=True))
    command = [job.interpreter, "-m", "palimpsa_launch.preparation", resolved]
    script = render_task(job, job_name(config.output_dir, config.name), folder, Path.cwd(), command)
    jobs.append(PlannedJob("finish", script, after=tuple(item.name for item in jobs)))
    lines = [
        f"preparation    {config.name} -> {config.folder}",
        *(
            f"array          {array}: {len(left)} of {config.arrays[array].tasks} tasks left"
            for array, left in tasks.items()
        ),
        *(f"then           megatron-palimpsa {command}" for command in config.then),
    ]
    return dataclasses.replace(step, plan="\n".join(lines), jobs=tuple(jobs), main="finish")


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
