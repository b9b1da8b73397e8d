"""`train`: a stage in this process, or the stages of a run one after the other in processes of their own."""

from __future__ import annotations

import argparse
import math

from megatron_palimpsa.commands.prep_job import count
from megatron_palimpsa.commands.submit import split_recipes


def add(commands: argparse._SubParsersAction) -> None:
    train = commands.add_parser(
        "train",
        help="train a stage, or all stages of a run, or go on where it stopped",
        description="Train a stage, or go on where it stopped; under torchrun every rank runs this command. With "
        "--nproc, several recipes or a run file: one after the other on this machine, in processes of their own, "
        "what is complete left out.",
    )
    train.add_argument(
        "recipes",
        nargs="+",
        metavar="RECIPE",
        help="YAML file of a stage or of a run, or the name of a packaged one (demo/run)",
    )
    train.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="changes any key of the file, for instance train.micro_batch_size=2",
    )
    train.add_argument("--nproc", type=count, metavar="N", help="processes on this machine, one a GPU")
    train.add_argument("--dry-run", action="store_true", help="print the resolved plan and start nothing")
    train.add_argument(
        "--gpu-memory",
        type=_gigabytes,
        metavar="GB",
        help="with --dry-run: what one GPU has, for advice where the stage does not fit (this machine's)",
    )
    train.add_argument(
        "--ranks",
        type=_rank_count,
        metavar="N",
        help="with --dry-run: the plan for so many ranks (those started, or as few as the layout takes)",
    )
    train.set_defaults(command=_train)


def _gigabytes(text: str) -> int:
    """-> bytes."""
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not 0 < size < 1e6:
        raise argparse.ArgumentTypeError(f"must be a number of gigabytes such as 80, not {text}")
    return round(size * 1e9)


def _rank_count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 10**6:
        raise argparse.ArgumentTypeError(f"must be a number of ranks such as 64, not {text}")
    return int(text)


def _train(options: argparse.Namespace) -> int:
    from palimpsa_launch.preparation import is_preparation
    from palimpsa_launch.recipes import find_recipe, find_recipes, is_run_file

    from megatron_palimpsa import launcher
    from megatron_palimpsa.config import ConfigError, load_stage
    from megatron_palimpsa.training import run
    from megatron_palimpsa.training.stages import follow_source

    if not options.dry_run and (options.ranks or options.gpu_memory):
        raise ConfigError("--ranks and --gpu-memory go with --dry-run alone: they are about the plan")
    names, overrides = split_recipes(options)
    several = len(names) > 1 or is_run_file(names[0])
    if options.nproc is not None or several or is_preparation(find_recipe(names[0])):
        if launcher.is_launched():
            raise ConfigError("the environment says WORLD_SIZE: torchrun trains one stage, without --nproc")
        return _train_here(options, names, overrides)
    config = follow_source(load_stage(find_recipes(names)[0], overrides))
    if not options.dry_run:
        return run.train(config)
    try:
        plan = run.dry_run(config, options.gpu_memory, options.ranks)
    except run.NotReady as error:
        if launcher.rank() == 0:
            print(error.plan, flush=True)
        raise
    if launcher.rank() == 0:
        print(plan)
    return 0


def _train_here(options: argparse.Namespace, names: list[str], overrides: list[str]) -> int:
    from palimpsa_launch.local import plan_here, run_here
    from palimpsa_launch.recipes import find_recipes

    from megatron_palimpsa.training import advice

    ranks = options.ranks or options.nproc or 1
    recipes = find_recipes(names)
    plans = plan_here(recipes, overrides, ranks, options.gpu_memory or advice.gpu_memory())
    if options.dry_run:
        print("\n\n".join(plans))
        return 0
    return run_here(recipes, overrides, ranks)
