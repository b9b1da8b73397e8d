"""What every source can be told; the command line makes its flags from these fields."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from palimpsa_data.errors import DataError

Loose = Literal["", "text", "blobs"]


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
    """`loose` says which files without rows a folder may hold: plain text, blobs by their id, or neither.

    Raises:
        DataError: a value that cannot be; the message says what can.
    """

    loose: ClassVar[Loose] = ""

    strict: bool = option(False, "end with an error at the first damaged row instead of counting it", decides=False)


@dataclass(frozen=True)
class TextLengths(SourceOptions):
    """Limits on documents, in characters."""

    min_length: int = option(1, "leave out documents with fewer characters (%(default)s)")
    max_length: int | None = option(None, "leave out documents with more characters")

    def __post_init__(self) -> None:
        if self.min_length < 1:
            raise DataError(f"--min-length must be at least 1, not {self.min_length}")
        if self.max_length is not None and self.max_length < self.min_length:
            raise DataError(f"--max-length {self.max_length} is below --min-length {self.min_length}")
