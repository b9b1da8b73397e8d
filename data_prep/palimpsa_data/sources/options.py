"""What every source can be told; the command line makes its flags from these fields."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from palimpsa_data.errors import DataError

Loose = Literal["", "text", "blobs"]


def option(default: Any, text: str, *, metavar: str = "N") -> Any:
    """A field with what `--help` says of it."""
    return dataclasses.field(default=default, metadata={"help": text, "metavar": metavar})


def flag(name: str) -> str:
    """The command line's spelling of a field."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class SourceOptions:
    """`loose` says which files without rows a folder may hold: plain text, blobs by their id, or neither.

    Raises:
        DataError: a value that cannot be; the message says what can.
    """

    loose: ClassVar[Loose] = ""

    strict: bool = option(False, "end with an error at the first damaged row instead of counting it")


@dataclass(frozen=True)
class TextLengths(SourceOptions):
    """Limits on documents; the sources apply those in characters, the encoder those in tokens."""

    min_length: int = option(1, "leave out documents with fewer characters (%(default)s)")
    max_length: int | None = option(None, "leave out documents with more characters")
    min_tokens: int = option(1, "leave out documents with fewer tokens (%(default)s)")
    max_tokens: int | None = option(None, "leave out documents with more tokens")

    def __post_init__(self) -> None:
        for unit in ("length", "tokens"):
            least, most = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            if least < 1:
                raise DataError(f"--min-{unit} must be at least 1, not {least}")
            if most is not None and most < least:
                raise DataError(f"--max-{unit} {most} is below --min-{unit} {least}")
