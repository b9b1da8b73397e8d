"""`bench`: tokens a second, MFU and memory of a stage, under one or several layouts."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "bench",
        help="tokens a second, MFU and peak memory of a stage on random tokens",
        description="Train a few steps of a stage on random packed tokens and print tokens a second, MFU and peak "
        "memory beside the plan's estimate, and how far layouts differ in losses. Needs no data, tokenizer or run "
        "folder; under torchrun every rank runs it.",
    )
    parser.add_argument(
        "recipe", metavar="STAGE", help="the stage's YAML file, or the name of a packaged one (bench/2.7b)"
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="KEY=VALUE", help="changes any key of the file, in every case"
    )
    parser.add_argument(
        "--case",
        dest="cases",
        action="append",
        default=[],
        metavar="NAME:KEY=VALUE,...",
        help="measure the stage with these changes; repeated, one process measures all (the stage as it is)",
    )
    parser.add_argument(
        "--layouts",
        metavar="FILE",
        help="measure the stage under each layout of this file that the number of ranks allows: a YAML file of "
        "NAME: [KEY=VALUE, ...], or the name of a packaged one (bench/layouts)",
    )
    parser.add_argument("--data", action="store_true", help="train on the stage's own data instead of random tokens")
    parser.add_argument(
        "--profile", action="store_true", help="on GPUs: what one more step spends its time on, by kernels of rank 0"
    )
    parser.add_argument("--warmup", type=_count, default=2, metavar="N", help="steps before the clock (%(default)s)")
    parser.add_argument("--steps", type=_count, default=5, metavar="N", help="timed steps (%(default)s)")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="append a record a case to a .jsonl or .csv, with a picture beside it; what is there from before is not "
        "measured again",
    )
    parser.add_argument(
        "--save",
        type=Path,
        metavar="FOLDER",
        help="then save each case's state there in the background, and say for how long training stood still",
    )
    parser.set_defaults(command=_bench)


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 10**6:
        raise argparse.ArgumentTypeError(f"must be an integer from 1 to 1000000, not {text}")
    return int(text)


def _bench(options: argparse.Namespace) -> int:
    from palimpsa_launch.recipes import find_recipe

    from megatron_palimpsa import bench, launcher

    layouts = None if options.layouts is None else find_recipe(options.layouts)
    cases = bench.read_cases(
        find_recipe(options.recipe), options.overrides, options.cases, launcher.world_size(), layouts
    )
    plan = bench.Plan(options.warmup, options.steps, own_data=options.data, profile=options.profile)
    return bench.run_cases(cases, plan, output=options.output, save=options.save)
