"""The command line: `megatron-palimpsa {demo,prep,convert,train,submit,status,logs,cancel,resume,save-now,bench,...}`.

Every command imports what it needs when it runs, so that `--help` and wrong input answer at once.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TextIO


def main(arguments: list[str] | None = None, at_end: Callable[[int], None] | None = None) -> int:
    """Run one command; the exit code is that of `training.exit_codes.ExitCode`.

    `at_end` is given the code before the process may end at once, which it does without returning from here. Without it
    the output is also that of the machine's other ranks, which find the same wrong input: one of them says so.
    """
    from megatron_palimpsa import launcher
    from megatron_palimpsa.training.exit_codes import ExitCode

    try:
        code = _run(arguments, own_output=at_end is not None)
    except KeyboardInterrupt:
        print(
            "megatron-palimpsa: interrupted; what was saved stays, the same command goes on from there", file=sys.stderr
        )
        code = ExitCode.INTERRUPTED
    except Exception as error:
        if not _others_may_wait():
            raise
        if _is_of_communication(error):
            print(
                f"megatron-palimpsa: error: rank {launcher.rank()} cannot reach the others: {error}\nIf one of them "
                f"ended first, what it printed says why. Checkpoints stay; the same command goes on from the newest",
                file=sys.stderr,
            )
        else:
            traceback.print_exc()
        code = ExitCode.FAILED
    if at_end is not None:
        at_end(code)
    if _others_may_wait():
        launcher.end_at_once(code)
    return code


def _others_may_wait() -> bool:
    """Whether an error left this rank of several in its process group (`parallel.leaving`)."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized() and distributed.get_world_size() > 1


def _is_of_communication(error: Exception) -> bool:
    """Whether a collective failed; where it was called says nothing about why."""
    import torch.distributed as dist

    # Gloo has no class of its own.
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo/transport" in str(error))


def _run(arguments: list[str] | None, own_output: bool) -> int:
    options = parse(arguments)
    from palimpsa_data import DataError

    from megatron_palimpsa import launcher
    from megatron_palimpsa.config import ConfigError
    from megatron_palimpsa.training.exit_codes import ExitCode

    try:
        _start_logging(sys.stderr if getattr(options, "output_is_text", False) else sys.stdout)
        return int(options.command(options))
    except (ConfigError, DataError) as error:
        if own_output or launcher.local_rank() == 0 or _others_may_wait():
            print(f"megatron-palimpsa: error: {error}", file=sys.stderr)
        return ExitCode.WRONG_INPUT
    except BrokenPipeError:
        # Whoever read the output has gone; nothing is left to say, at exit neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
    except OSError as error:
        print(f"megatron-palimpsa: error: {error}", file=sys.stderr)
        return ExitCode.FAILED


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """What the arguments ask for; SystemExit, with argparse's message on standard error, where they ask for nothing."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse takes no more positional arguments after an option: CONFIG --dry-run KEY=VALUE, MODEL --seed 1 PROMPT.
    if len(rest) == 1 and getattr(options, "prompt", "") is None and not _is_an_option(rest[0]):
        options.prompt = rest.pop()
    overrides = getattr(options, "overrides", None)
    if rest and (overrides is None or any(item.startswith("-") for item in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if overrides is not None:
        options.overrides = [*overrides, *rest]
    return options


def _is_an_option(item: str) -> bool:
    """As argparse tells: what has a space in it is text."""
    return item.startswith("-") and " " not in item


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-palimpsa",
        description="Train hybrid state-space models with Palimpsa layers in Megatron-Core.",
        epilog="Exit codes: 0 complete, 1 a file could not be written or read (or any error with a traceback), "
        "2 wrong input, 3 numerical stop, "
        "75 saved and stopped (start again to go on), 130 interrupted with Ctrl-C.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_prep(commands)
    _add_convert(commands)
    _add_export(commands)
    _add_train(commands)
    _add_submit(commands)
    _add_runs(commands)
    _add_bench(commands)
    _add_generate(commands)
    _add_mqar(commands)
    _add_eval(commands)
    _add_report(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction) -> None:
    demo = commands.add_parser(
        "demo",
        help="prepare real text, train the small three-stage run on this machine and report",
        description="Prepare real text, train three stages and report; started again it goes on where it was.",
    )
    demo.add_argument("--folder", type=Path, default=Path("runs/demo"), help="where everything goes (%(default)s)")
    demo.add_argument(
        "--engine", choices=("megatron", "deepspeed"), default="megatron", help="what trains (%(default)s)"
    )
    demo.set_defaults(command=_demo)


def _add_prep(commands: argparse._SubParsersAction) -> None:
    from megatron_palimpsa.commands import prep_needles, prep_sets, prep_sources, prep_tokenizer

    prep = commands.add_parser(
        "prep",
        help="make shard sets and a tokenizer from text",
        description="Make shard sets, blends and a tokenizer from text; what is there already is verified and kept.",
    )
    recipes = prep.add_subparsers(title="what to prepare", metavar="WHAT", required=True)
    prep_tokenizer.add(recipes)
    prep_sources.add(recipes)
    prep_needles.add(recipes)
    prep_sets.add(recipes)
    demo = recipes.add_parser(
        "demo",
        help="the demo's tokenizer, sets and blends, from text that this machine has",
        description="Make the demo's SentencePiece tokenizer, shard sets and blends, from Python's standard library "
        "and what manuals this machine has; what is there already is verified and kept.",
    )
    demo.add_argument("--folder", type=Path, default=Path("runs/demo/data"), help="output folder (%(default)s)")
    demo.set_defaults(command=_prep_demo)


def _add_convert(commands: argparse._SubParsersAction) -> None:
    from megatron_palimpsa.commands import convert

    convert.add(commands)


def _add_export(commands: argparse._SubParsersAction) -> None:
    from megatron_palimpsa.commands import export

    export.add(commands)


def _add_train(commands: argparse._SubParsersAction) -> None:
    from megatron_palimpsa.commands import train

    train.add(commands)


def _add_submit(commands: argparse._SubParsersAction) -> None:
    from megatron_palimpsa.commands import submit

    submit.add(commands)


def _add_runs(commands: argparse._SubParsersAction) -> None:
    from megatron_palimpsa.commands import runs

    runs.add(commands)


def _add_bench(commands: argparse._SubParsersAction) -> None:
    from megatron_palimpsa.commands import bench

    bench.add(commands)


def _add_generate(commands: argparse._SubParsersAction) -> None:
    from megatron_palimpsa.commands import generate

    generate.add(commands)


def _add_mqar(commands: argparse._SubParsersAction) -> None:
    from megatron_palimpsa.commands import mqar

    mqar.add(commands)


def _add_eval(commands: argparse._SubParsersAction) -> None:
    from megatron_palimpsa.commands import eval as evaluate

    evaluate.add(commands)


def _add_report(commands: argparse._SubParsersAction) -> None:
    report = commands.add_parser(
        "report",
        help="table and pictures of the stages in a folder",
        description="Write FOLDER/report (table, pictures, generated lines) from the complete stages in FOLDER.",
    )
    report.add_argument("folder", type=Path, metavar="FOLDER", help="the stages' output_dir, for instance runs/demo")
    report.set_defaults(command=_report)


def _demo(options: argparse.Namespace) -> int:
    from megatron_palimpsa import demo

    return demo.run(options.folder, options.engine)


def _prep_demo(options: argparse.Namespace) -> int:
    from palimpsa_data import demo

    demo.prepare(options.folder, progress=print)
    return 0


def _report(options: argparse.Namespace) -> int:
    from megatron_palimpsa import report

    report.build(options.folder)
    return 0


def _start_logging(progress_to: TextIO) -> None:
    """Progress to one stream (rank 0 only), warnings and errors to standard error (every rank)."""
    from megatron_palimpsa import launcher

    # Megatron says at every start that Transformer Engine and Apex, which are not needed, are not there.
    for category in (UserWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category, module=r"megatron\.core\.|torch\.")
    # Nor is it worth a warning that a machine with nvcc has no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # A reader of the output that has gone stops no training, nor does it fill standard error.
    logging.raiseExceptions = False
    # What the terminal has no character for, such as a table's plus-minus, is no reason to end.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    rank = launcher.rank()
    progress = logging.StreamHandler(progress_to)
    progress.addFilter(lambda record: record.levelno < logging.WARNING)
    progress.setFormatter(logging.Formatter("%(message)s"))
    problems = logging.StreamHandler(sys.stderr)
    problems.setLevel(logging.WARNING)
    prefix = f"rank {rank}: " if launcher.is_launched() else ""
    problems.setFormatter(logging.Formatter(f"{prefix}%(levelname)s: %(message)s"))
    for package in ("megatron_palimpsa", "palimpsa_kernels"):
        logger = logging.getLogger(package)
        logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
        logger.propagate = False
        logger.handlers = [progress, problems]
