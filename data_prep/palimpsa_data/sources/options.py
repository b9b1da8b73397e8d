"""What every source can be told; the command line makes its flags from these fields."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from palimpsa_data.errors import DataError

Loose = Literal["", "text", "blobs"]

LICENSE_TYPES = ("permissive", "no_license")
_LANGUAGE_CODE = re.compile(r"[A-Za-z]{2,3}([_-][A-Za-z]{2,8})?")


def option(default: Any, text: str, *, metavar: str = "N", decides: bool = True) -> Any:
    """A field with what `--help` says of it, and whether it decides what a shard holds."""
    return dataclasses.field(default=default, metadata={"help": text, "metavar": metavar, "decides": decides})


def deciding(options: Any) -> dict[str, Any]:
    """The fields of a dataclass that decide what a shard holds, as JSON has them."""
    fields = (field.name for field in dataclasses.fields(options) if field.metadata.get("decides", True))
    values = {name: getattr(options, name) for name in fields}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def flag(name: str) -> str:
    """The command line's spelling of a field."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class SourceOptions:
    """Raises DataError for a value that cannot be; the message says what can."""

    strict: bool = option(False, "end with an error at the first damaged row instead of counting it", decides=False)

    @property
    def loose(self) -> Loose:
        """Which files without rows count as input: plain text, blobs by their id, or neither."""
        return ""


@dataclass(frozen=True)
class TextLengths(SourceOptions):
    """Limits on documents, in characters; those in tokens are the encoder's (`pipeline.Limits`)."""

    min_length: int = option(1, "leave out documents with fewer characters (%(default)s)")
    max_length: int | None = option(None, "leave out documents with more characters")

    def __post_init__(self) -> None:
        if self.min_length < 1:
            raise DataError(f"--min-length must be at least 1, not {self.min_length}")
        if self.max_length is not None and self.max_length < self.min_length:
            raise DataError(f"--max-length {self.max_length} is below --min-length {self.min_length}")


@dataclass(frozen=True)
class FineWebOptions(TextLengths):
    """Filters; one on a column that the file does not have is an error, one on a row's null leaves the row out."""

    min_score: float | None = option(None, "leave out documents of a lower educational score (FineWeb-Edu: 0 to 5)")
    languages: tuple[str, ...] = option((), "keep these languages only, by their codes: en,fr", metavar="CODE")
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


@dataclass(frozen=True)
class StackV2Options(TextLengths):
    """Filters; a file that does not say its language or licence does not pass a filter on it."""

    languages: tuple[str, ...] = option(
        (), "keep these languages only, as the rows spell them: Python,C++", metavar="NAME"
    )
    license_types: tuple[str, ...] = option(
        (), f"keep files of these licence types only: {', '.join(LICENSE_TYPES)}", metavar="TYPE"
    )
    licenses: tuple[str, ...] = option(
        (), "keep files only whose detected licences are all among these SPDX ids: MIT,Apache-2.0", metavar="SPDX"
    )
    blobs: str | None = option(
        None, "where the blobs lie, as ID or ID.gz, that rows of ids name", metavar="FOLDER", decides=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind in self.license_types:
            if kind not in LICENSE_TYPES:
                raise DataError(f"--license-types takes {' and '.join(LICENSE_TYPES)}, not {kind!r}")

    @property
    def loose(self) -> Loose:
        # Those that rows name must not come in a second time, where they lie among the inputs.
        return "" if self.blobs else "blobs"


@dataclass(frozen=True)
class TextOptions(TextLengths):
    text_column: str = option("text", "the column that holds the documents (%(default)s)", metavar="NAME")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.text_column:
            raise DataError("--text-column must name a column")

    @property
    def loose(self) -> Loose:
        return "text"


@dataclass(frozen=True)
class LongAlpacaOptions(SourceOptions):
    pass
