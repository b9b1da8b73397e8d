"""`prep fineweb|stackv2|text|longalpaca`: files of text to the shards of a set."""

from __future__ import annotations

import argparse
import functools
from typing import TYPE_CHECKING

from palimpsa_data.sources.options import (
    FineWebOptions,
    LongAlpacaOptions,
    SourceOptions,
    StackV2Options,
    TextOptions,
)

from megatron_palimpsa.commands.prep_job import add_job_flags, add_option_flags, options_from, run

if TYPE_CHECKING:
    from palimpsa_data.plan import PrepJob

_SOURCES: dict[str, tuple[type[SourceOptions], str]] = {
    "fineweb": (FineWebOptions, "FineWeb and FineWeb-Edu, filtered by score, language and length"),
    "stackv2": (StackV2Options, "The Stack v2 in any shape, filtered by language and licence"),
    "text": (TextOptions, "any rows with a text column, or plain text files"),
    "longalpaca": (LongAlpacaOptions, "LongAlpaca: examples with loss on their answers only"),
}


def add(commands: argparse._SubParsersAction) -> None:
    """One command for each source."""
    for kind, (options, text) in _SOURCES.items():
        parser = commands.add_parser(
            kind,
            help=text,
            description=f"{text}. Each input file becomes one shard; what is there already is verified and kept, so "
            "the same command goes on after a kill.",
        )
        parser.add_argument(
            "inputs",
            nargs="+",
            metavar="INPUT",
            help="files, folders or globs of parquet, jsonl (also .gz, .zst) or JSON arrays, folders saved by "
            "`datasets`, or a hub name org/name[:config]",
        )
        add_job_flags(parser)
        add_option_flags(parser, options)
        _add_limits(parser, examples=options is LongAlpacaOptions)
        parser.set_defaults(command=_prepare, job=functools.partial(source_job, kind))


def _add_limits(parser: argparse.ArgumentParser, *, examples: bool) -> None:
    if examples:
        parser.add_argument(
            "--max-example-tokens",
            type=int,
            default=32768,
            metavar="N",
            help="longer examples lose text inside their document, never of their answer (%(default)s)",
        )
        return
    parser.add_argument(
        "--min-tokens", type=int, default=1, metavar="N", help="leave out documents with fewer tokens (%(default)s)"
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="leave out documents with more tokens")


def _prepare(arguments: argparse.Namespace) -> int:
    return run(arguments.job(arguments), arguments)


def source_job(kind: str, arguments: argparse.Namespace) -> PrepJob:
    """The job that the parsed flags describe."""
    from palimpsa_data.pipeline import Limits
    from palimpsa_data.plan import PrepJob
    from palimpsa_data.sources import find_inputs

    options_type, _ = _SOURCES[kind]
    options = options_from(arguments, options_type)
    examples = options_type is LongAlpacaOptions
    limits = (
        Limits(max_example_tokens=arguments.max_example_tokens)
        if examples
        else Limits(min_tokens=arguments.min_tokens, max_tokens=arguments.max_tokens)
    )
    return PrepJob(
        kind=kind,
        inputs=find_inputs(arguments.inputs, options.loose),
        options=options,
        tokenizer=arguments.tokenizer,
        output=arguments.output,
        limits=limits,
        loss_mask=examples,
        backend=arguments.backend,
    )
