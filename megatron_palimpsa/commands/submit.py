"""`submit`: a chain of stages as SLURM jobs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palimpsa_launch.chain import PlannedStep

_JOB_OPTIONS: tuple[tuple[str, type, str, str], ...] = (
    ("nodes", int, "N", "nodes of each job"),
    ("gpus-per-node", int, "N", "GPUs of a node; 0 trains on CPUs"),
    ("processes-per-node", int, "N", "processes of a node (one a GPU)"),
    ("time", str, "LIMIT", "time limit of an attempt, as SLURM reads it: 90, 12:00:00, 2-00:00:00"),
    ("partition", str, "NAME", "partition or partitions"),
    ("account", str, "NAME", "account"),
    ("qos", str, "NAME", "quality of service"),
    ("constraint", str, "FEATURES", "features that nodes must have"),
    ("exclude", str, "NODES", "nodes to stay away from"),
    ("container", str, "ENGINE:IMAGE", "run in an image: apptainer:/images/palimpsa.sif, pyxis:org#name:tag"),
)


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "submit",
        help="train stages one after the other as SLURM jobs",
        description="Check stages and their jobs, then submit one SLURM job a stage, each starting when the one before "
        "it is complete. Stages that are complete are left out, so the same command goes on with a chain.",
    )
    parser.add_argument(
        "recipes",
        nargs="+",
        metavar="RECIPE",
        help="YAML files of stages, preparations and whole runs, in order, or names of packaged ones (demo/run)",
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="KEY=VALUE", help="changes any key of the files, in every stage"
    )
    parser.add_argument("--job", type=Path, metavar="FILE", help="YAML file of the job's settings")
    add_job_options(parser)
    parser.add_argument("--dry-run", action="store_true", help="print plans and scripts and submit nothing")
    parser.set_defaults(command=_submit)


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """An option for each setting of the job that is often changed."""
    for name, kind, value, text in _JOB_OPTIONS:
        parser.add_argument(f"--{name}", type=kind, metavar=value, help=text)


def job_changes(options: argparse.Namespace) -> dict[str, Any]:
    """Keys of `JobConfig` that options give.

    Raises:
        ConfigError: --container without an engine.
    """
    from megatron_palimpsa.config import ConfigError

    names = [name.replace("-", "_") for name, *_ in _JOB_OPTIONS]
    changes = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if container := changes.get("container"):
        engine, colon, image = container.partition(":")
        if not colon:
            raise ConfigError(f"--container {container}: takes ENGINE:IMAGE, such as apptainer:/images/palimpsa.sif")
        changes["container"] = {"engine": engine, "image": image}
    return changes


def split_recipes(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """-> names of recipes, overrides: argparse cannot tell them apart. A file may have `=` in its path.

    Raises:
        ConfigError: there are overrides alone.
    """
    from megatron_palimpsa.config import ConfigError

    given = [*options.recipes, *options.overrides]
    overrides = [item for item in given if "=" in item and not Path(item).is_file()]
    names = [item for item in given if item not in overrides]
    if not names:
        raise ConfigError(f"no recipe is named, only {given[0]}")
    return names, overrides


def submit_or_print(steps: Sequence[PlannedStep], *, dry_run: bool) -> int:
    """Submit what is left and say so in a line a job, or print plans and scripts; -> exit code."""
    from palimpsa_launch.submit import submit_chain

    submitted = {} if dry_run else submit_chain(steps)
    for step in steps:
        if step.is_complete:
            print(f"stage          {step.name}: complete already, nothing to submit\n")
        elif dry_run:
            print("\n\n".join([step.plan, *(job.script for job in step.jobs)]))
        else:
            for job in step.jobs:
                name = step.name if job.name == step.main else f"{step.name}.{job.name}"
                print(f"{name}: job {submitted[name]}, logs in {step.folder / 'logs'}")
    return 0


def _submit(options: argparse.Namespace) -> int:
    from palimpsa_launch.chain import plan_chain
    from palimpsa_launch.job import load_job
    from palimpsa_launch.recipes import find_recipes

    names, overrides = split_recipes(options)
    job = load_job(options.job, job_changes(options))
    recipes = find_recipes(names)
    steps = plan_chain(recipes, overrides, [job] * len(recipes))
    return submit_or_print(steps, dry_run=options.dry_run)
