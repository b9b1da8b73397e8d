"""FineWeb and FineWeb-Edu: rows of which only `text` is sure; filters by score, language and length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from palimpsa_data.documents import Document, Skipped
from palimpsa_data.sources.inputs import Input
from palimpsa_data.sources.options import FineWebOptions
from palimpsa_data.sources.rows import read_rows
from palimpsa_data.sources.streams import BadRow
from palimpsa_data.sources.texts import checked_text, document


def read(source: Input, options: FineWebOptions, progress: Callable[[int], None]) -> Iterator[Document | Skipped]:
    """One document a row that passes the filters; shares are counted by `dump`, by file where there is none.

    Raises:
        DataError: the file has no column `text`, or none that a filter needs.
    """
    required: list[tuple[str, ...]] = [("text",)]
    if options.min_score is not None:
        required.append(("score", "int_score"))
    if options.languages:
        required.append(("language",))
    if options.min_language_score is not None:
        required.append(("language_score",))
    columns = {"dump", *(name for group in required for name in group)}
    for row in read_rows(source, columns, progress, required=required):
        yield Skipped(row.reason, damaged=True) if isinstance(row, BadRow) else _document(row, source, options)


def _document(row: dict[str, Any], source: Input, options: FineWebOptions) -> Document | Skipped:
    text = checked_text(row.get("text"), "text")
    if isinstance(text, Skipped):
        return text
    if options.min_score is not None:
        score = row.get("score", row.get("int_score"))
        if not isinstance(score, int | float):
            return Skipped("no score")
        if not score >= options.min_score:
            return Skipped(f"score below {options.min_score}")
    if options.languages and not _is_among(row.get("language"), options.languages):
        return Skipped(f"language is not {' or '.join(options.languages)}")
    if options.min_language_score is not None:
        score = row.get("language_score")
        if not isinstance(score, int | float):
            return Skipped("no language score")
        if not score >= options.min_language_score:
            return Skipped(f"language score below {options.min_language_score}")
    dump = row.get("dump")
    return document(text, dump if isinstance(dump, str) and dump else source.stem, options)


def _is_among(language: Any, wanted: tuple[str, ...]) -> bool:
    return isinstance(language, str) and language.casefold() in (code.casefold() for code in wanted)
