"""Where text comes from: each kind reads an `Input` and yields documents, examples and what was left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from palimpsa_data.documents import Item, Skipped
from palimpsa_data.errors import DataError
from palimpsa_data.sources.inputs import Input, find_inputs
from palimpsa_data.sources.options import (
    FineWebOptions,
    LongAlpacaOptions,
    SourceOptions,
    StackV2Options,
    TextOptions,
)

__all__ = [
    "FineWebOptions",
    "Input",
    "LongAlpacaOptions",
    "SourceOptions",
    "StackV2Options",
    "TextOptions",
    "find_inputs",
    "read",
]


def read(source: Input, options: SourceOptions, progress: Callable[[int], None]) -> Iterator[Item]:
    """Everything an input holds, in its order, in bounded memory; `progress` gets the bytes read so far.

    Raises:
        DataError: the input as a whole cannot serve; with `options.strict` any damaged row of it.
    """
    documents = 0
    for item in _items(source, options, progress):
        if isinstance(item, Skipped):
            if options.strict and item.damaged:
                raise DataError(
                    f"{source.path}: {item.reason}, after {documents} good rows; --strict allows no such row"
                )
        else:
            documents += 1
        yield item


def _items(source: Input, options: SourceOptions, progress: Callable[[int], None]) -> Iterator[Item]:
    # The readers need pyarrow and numpy, which take longer to import than the command line may take to answer.
    match options:
        case FineWebOptions():
            from palimpsa_data.sources import fineweb

            return fineweb.read(source, options, progress)
        case StackV2Options():
            from palimpsa_data.sources import stackv2

            return stackv2.read(source, options, progress)
        case TextOptions():
            from palimpsa_data.sources import text

            return text.read(source, options, progress)
        case LongAlpacaOptions():
            from palimpsa_data.sources import longalpaca

            return longalpaca.read(source, options, progress)
    raise TypeError(f"no source takes {type(options).__name__}")
