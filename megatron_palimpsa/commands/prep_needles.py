"""`prep needles`: long documents with hidden facts, made from a seed."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from megatron_palimpsa.commands.prep_job import add_job_flags, add_option_flags, options_from, run

if TYPE_CHECKING:
    from palimpsa_data.plan import PrepJob


def add(commands: argparse._SubParsersAction) -> None:
    from palimpsa_data.needles.generate import NeedleOptions

    parser = commands.add_parser(
        "needles",
        help="documents of any length in which facts are hidden and asked for, from a seed",
        description="Documents of the RULER families in any length: single, multi-key, multi-value and multi-query "
        "needles, variable tracing, common and frequent words; keys, wording and seeds are apart from evaluation's. "
        "The same options and tokenizer give the same bytes.",
    )
    add_job_flags(parser)
    add_option_flags(parser, NeedleOptions)
    parser.set_defaults(command=_prepare, job=needle_job)


def _prepare(arguments: argparse.Namespace) -> int:
    return run(needle_job(arguments), arguments)


def needle_job(arguments: argparse.Namespace) -> PrepJob:
    """The job that the parsed flags describe."""
    from palimpsa_data.needles.generate import NeedleOptions
    from palimpsa_data.needles.source import NeedleReader, needle_inputs
    from palimpsa_data.pipeline import Limits
    from palimpsa_data.plan import PrepJob

    options: NeedleOptions = options_from(arguments, NeedleOptions)
    return PrepJob(
        kind="needles",
        inputs=needle_inputs(options),
        options=options,
        tokenizer=arguments.tokenizer,
        output=arguments.output,
        limits=Limits(max_example_tokens=options.longest),
        loss_mask=options.loss == "answer",
        backend=arguments.backend,
        read=NeedleReader(arguments.tokenizer, arguments.backend),
    )
