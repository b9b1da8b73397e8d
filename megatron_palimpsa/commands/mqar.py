"""`mqar`: sweeps of models over multi-query associative recall."""

from __future__ import annotations

import argparse
import math

from megatron_palimpsa.commands.prep_job import count


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "mqar",
        help="train models on multi-query associative recall over learning rates and seeds, and draw accuracy",
        description="Train each recipe's model on multi-query associative recall, a curriculum over lengths, for every "
        "learning rate and seed, and write OUTPUT_DIR/report (table, CSV, pictures). Finished runs are left out and "
        "the others go on from their last epoch, so the same command goes on with a sweep that was cut; several "
        "processes, on several GPUs (CUDA_VISIBLE_DEVICES) too, may work on one sweep.",
    )
    parser.add_argument(
        "recipes",
        nargs="+",
        metavar="RECIPE",
        help="YAML file of a model's sweep, or the name of a packaged one (mqar/palimpsa-m)",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="changes any key of the files, in each of them, for instance sweep.seeds=[0,1]",
    )
    parser.add_argument(
        "--jobs", type=count, default=1, metavar="N", help="processes that train at the same time (%(default)s)"
    )
    parser.add_argument(
        "--minutes",
        type=_minutes,
        metavar="M",
        help="begin no epoch that would end later than so many minutes from now (exit code 75 where runs are left)",
    )
    parser.add_argument("--report", action="store_true", help="train nothing, write the report of what is there")
    parser.add_argument("--worker-of", type=count, help=argparse.SUPPRESS)
    parser.set_defaults(command=_mqar)


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of minutes such as 30, not {text}")
    return minutes


def _mqar(options: argparse.Namespace) -> int:
    from palimpsa_launch.recipes import find_recipes

    from megatron_palimpsa import launcher
    from megatron_palimpsa.commands.submit import split_recipes
    from megatron_palimpsa.config import ConfigError
    from megatron_palimpsa.experiments.mqar.config import load_sweep
    from megatron_palimpsa.experiments.mqar.folders import common_folder
    from megatron_palimpsa.experiments.mqar.sweep import sweep

    if launcher.world_size() > 1:
        raise ConfigError("the environment says WORLD_SIZE: mqar is not for torchrun, --jobs N starts its processes")
    names, overrides = split_recipes(options)
    configs = [load_sweep(recipe, overrides) for recipe in find_recipes(names)]
    output_dir = common_folder(configs)
    code = 0
    if not options.report:
        again = ["mqar", *names, *overrides]
        if options.minutes is not None:
            again += ["--minutes", str(options.minutes)]
        code = sweep(configs, options.jobs, options.minutes, again, options.worker_of)
    if options.worker_of is None:
        from megatron_palimpsa.experiments.mqar.report import build

        build(output_dir)
    return code
