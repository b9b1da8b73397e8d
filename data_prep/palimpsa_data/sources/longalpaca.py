"""LongAlpaca: instruction, output and often nothing as input; the document and its question are in the instruction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from palimpsa_data.documents import Example, Skipped
from palimpsa_data.instruct import alpaca
from palimpsa_data.sources.inputs import Input
from palimpsa_data.sources.options import LongAlpacaOptions
from palimpsa_data.sources.rows import read_rows
from palimpsa_data.sources.streams import BadRow
from palimpsa_data.sources.texts import checked_text

_COLUMNS = ("instruction", "input", "output")


def read(source: Input, options: LongAlpacaOptions, progress: Callable[[int], None]) -> Iterator[Example | Skipped]:
    """One example a row, whole; shares are counted by file.

    Raises:
        DataError: the file has no columns `instruction` and `output`.
    """
    for row in read_rows(source, _COLUMNS, progress, required=[("instruction",), ("output",)]):
        yield Skipped(row.reason, damaged=True) if isinstance(row, BadRow) else _example(row, source)


def _example(row: dict[str, Any], source: Input) -> Example | Skipped:
    instruction = checked_text(row.get("instruction"), "instruction")
    answer = checked_text(row.get("output"), "output")
    for part in (instruction, answer):
        if isinstance(part, Skipped):
            return part
    context = row.get("input") or ""
    if not isinstance(context, str):
        return Skipped("input is not a string", damaged=True)
    assert isinstance(instruction, str)
    assert isinstance(answer, str)
    # Of the two, the longer is the one with the document.
    return alpaca(instruction, context, answer, source.stem, shorten_instruction=len(instruction) > len(context))
