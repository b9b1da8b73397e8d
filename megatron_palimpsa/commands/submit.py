"""`submit`: a chain of stages as SLURM jobs."""

from __future__ import annotations

import argparse
from pathlib import Path

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
)


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "submit",
        help="train stages one after the other as SLURM jobs",
        description="Check stages and their jobs, then submit one SLURM job a stage, each starting when the one before "
        "it is complete. Stages that are complete are left out, so the same command goes on with a chain.",
    )
    parser.add_argument("recipes", nargs="+", metavar="RECIPE", help="the stages' YAML files, in order")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="KEY=VALUE", help="changes any key of the files, in every stage"
    )
    parser.add_argument("--job", type=Path, metavar="FILE", help="YAML file of the job's settings")
    for name, kind, value, text in _JOB_OPTIONS:
        parser.add_argument(f"--{name}", type=kind, metavar=value, help=text)
    parser.add_argument("--dry-run", action="store_true", help="print plans and scripts and submit nothing")
    parser.set_defaults(command=_submit)


def _submit(options: argparse.Namespace) -> int:
    from palimpsa_launch.chain import plan_chain
    from palimpsa_launch.job import load_job
    from palimpsa_launch.submit import submit_chain

    given = [*options.recipes, *options.overrides]
    recipes = [Path(item) for item in given if "=" not in item]
    overrides = [item for item in given if "=" in item]
    names = [name.replace("-", "_") for name, *_ in _JOB_OPTIONS]
    job = load_job(options.job, {name: getattr(options, name) for name in names})
    stages = plan_chain(recipes, overrides, job)
    submitted = {} if options.dry_run else submit_chain(stages, job)
    for stage in stages:
        if stage.is_complete:
            print(f"stage          {stage.config.name}: complete already, nothing to submit\n")
        elif options.dry_run:
            print(f"{stage.plan}\n\n{stage.script}")
        else:
            print(f"{stage.config.name}: job {submitted[stage.config.name]}, logs in {stage.folder / 'logs'}")
    return 0
