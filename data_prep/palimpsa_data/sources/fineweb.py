"""FineWeb and FineWeb-Edu: rows of which only `text` is sure; filters by score, language and length."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from palimpsa_data.documents import Document, Skipped
from palimpsa_data.errors import DataError
from palimpsa_data.sources.inputs import Input
from palimpsa_data.sources.options import TextLengths, option
from palimpsa_data.sources.rows import read_rows
from palimpsa_data.sources.streams import BadRow
from palimpsa_data.sources.texts import checked_text, document

_LANGUAGE_CODE = re.compile(r"[A-Za-z]{2,3}([_-][A-Za-z]{2,8})?")


@dataclass(frozen=True)
class FineWebOptions(TextLengths):
    """Filters; one on a column that the file does not have is an error, one on a row's null leaves the row out."""

    min_score: float | None = option(None, "leave out documents of a lower educational score (FineWeb-Edu: 0 to 5)")
    languages: tuple[str, ...] = option((), "keep these languages only, by their codes: en fr", metavar="CODE")
    min_language_score: float | None = option(None, "leave out documents whose language is less sure (0 to 1)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_score is not None and not math.isfinite(self.min_score):
            raise DataError(f"--min-score must be a number, not {self.min_score}")
        if self.min_language_score is not None and not 0 <= self.min_language_score <= 1:
            raise DataError(f"--min-language-score must be from 0 to 1, not {self.min_language_score}")
        for code in self.languages:
            if not _LANGUAGE_CODE.fullmatch(code):
                raise DataError(f"--languages takes codes of two or three letters such as en or deu, not {code!r}")


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
    if options.languages and row.get("language") not in options.languages:
        return Skipped(f"language is not {' or '.join(options.languages)}")
    if options.min_language_score is not None:
        score = row.get("language_score")
        if not isinstance(score, int | float):
            return Skipped("no language score")
        if not score >= options.min_language_score:
            return Skipped(f"language score below {options.min_language_score}")
    dump = row.get("dump")
    return document(text, dump if isinstance(dump, str) and dump else source.stem, options)
