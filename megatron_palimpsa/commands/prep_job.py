"""What all commands that fill a set with shards have in common: flags from an options class, running the job."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import types
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palimpsa_data.jobs import JobResult
    from palimpsa_data.plan import PrepJob

# The same as palimpsa_data.tokenizers.BACKENDS, which takes longer to import than `--help` may take.
BACKENDS = ("auto", "gigatoken", "huggingface")


def add_job_flags(parser: argparse.ArgumentParser) -> None:
    """Flags for the output, the tokenizer, and which part of the job this call does."""
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FOLDER", help="where the shards go; its name is the set's"
    )
    parser.add_argument(
        "--tokenizer", type=Path, required=True, metavar="FILE", help="tokenizer.json, or a SentencePiece .model"
    )
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default="auto",
        help="what encodes with a tokenizer.json (%(default)s: gigatoken where it is installed)",
    )
    parser.add_argument(
        "--shard", type=_share, metavar="I/N", help="do task I of N only, counted from 0: for arrays of jobs"
    )
    parser.add_argument(
        "--processes", type=count, default=1, metavar="N", help="processes on this machine (%(default)s)"
    )


def add_option_flags(parser: argparse.ArgumentParser, options: type) -> None:
    """A flag for each field of a dataclass of `sources.options.option`s; lists are separated by commas."""
    hints = typing.get_type_hints(options)
    for field in dataclasses.fields(options):
        name, text = "--" + field.name.replace("_", "-"), field.metadata["help"]
        if hints[field.name] is bool:
            parser.add_argument(name, action="store_true", help=text)
        else:
            kind = _parser_of(hints[field.name])
            parser.add_argument(name, type=kind, default=field.default, metavar=field.metadata["metavar"], help=text)


def options_from(arguments: argparse.Namespace, options: type) -> Any:
    """The dataclass from the parsed flags.

    Raises:
        DataError: a value that cannot be.
    """
    return options(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(options)})


def run(job: PrepJob, arguments: argparse.Namespace) -> int:
    """Run the job with progress on standard error, then report; the set is merged where all shards are there.

    -> exit code.
    """
    from palimpsa_data.jobs import run_job
    from palimpsa_data.merge import job_status, merge
    from palimpsa_data.progress import console
    from palimpsa_data.report import report_on

    result = run_job(
        job, shard=arguments.shard, processes=arguments.processes, progress=console(), say=_say_on_standard_error
    )
    print(_summary(job, result))
    status = job_status(job.output)
    if status.is_complete:
        _, report = merge(job.output)
        print(f"{report.text()}\n{job.output} holds set.json, report.txt, report.json and lengths.png")
    else:
        print(f"{report_on('these shards', result.shards).text()}\n{status.text()}")
    return 0


def _summary(job: PrepJob, result: JobResult) -> str:
    manifests = result.shards.values()
    skipped = sum(sum(manifest.skipped.values()) for manifest in manifests)
    damaged = sum(manifest.damaged for manifest in manifests)
    return (
        f"{len(result.shards)} of {len(job.inputs)} shards in {job.output}, {result.written} of them written now: "
        f"{sum(manifest.documents for manifest in manifests):,} documents, "
        f"{sum(manifest.tokens for manifest in manifests):,} tokens, {skipped:,} left out ({damaged:,} damaged)"
    )


def _say_on_standard_error(line: str) -> None:
    print(line, file=sys.stderr)


def _parser_of(hint: Any) -> Any:
    if typing.get_origin(hint) is tuple:
        return _names
    if isinstance(hint, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
    return hint


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"must be names separated by commas, not {text!r}")
    return names


def _share(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not int(found[1]) < int(found[2]):
        raise argparse.ArgumentTypeError(f"must be I/N with 0 <= I < N, tasks counted from 0, not {text}")
    return int(found[1]), int(found[2])


def count(text: str) -> int:
    """A flag's number of things, of which there is one at least."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be an integer from 1, not {text}")
    return int(text)
