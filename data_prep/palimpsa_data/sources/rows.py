"""Rows of any input: one dictionary each, or a `BadRow` in its place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from palimpsa_data.errors import DataError
from palimpsa_data.optional import optional_packages
from palimpsa_data.sources.hub import hub_rows
from palimpsa_data.sources.inputs import Input
from palimpsa_data.sources.streams import BadRow, json_rows

Row = dict[str, Any] | BadRow

_ENOUGH_ROWS = 1000
_REPACK = "unpack it, or pack it with gzip or zstd"
# What a file that should hold rows may turn out to be, by its first bytes.
_MISTAKEN = {
    b"PAR1": "a parquet file under another name: rename it",
    b"version https://git-lfs": "a Git LFS pointer, not the file itself: run `git lfs pull`",
    b"BZh": f"packed with bzip2: {_REPACK}",
    b"\xfd7zXZ": f"packed with xz: {_REPACK}",
    b"\x04\x22\x4d\x18": f"packed with lz4: {_REPACK}",
    b"PK\x03\x04": f"a zip archive: {_REPACK}",
    b"\xff\xfe": "text in UTF-16: write it in UTF-8",
    b"\xfe\xff": "text in UTF-16: write it in UTF-8",
    b"<": "a web page, not data: fetch it again",
}


def read_rows(
    source: Input, columns: Collection[str], progress: Callable[[int], None], *, required: Sequence[Sequence[str]]
) -> Iterator[Row]:
    """Rows of an input, with those of `columns` that it has (JSON rows come whole).

    Args:
        progress: gets the bytes of the input that are read so far.
        required: of each of these groups at least one column must be there.

    Raises:
        DataError: the file as a whole is not what its name says, or no row has a column that is required.
    """
    if source.format in ("parquet", "json"):
        _refuse_mistaken(source.path, source.format)
    if source.format in ("parquet", "arrow"):
        with optional_packages():
            from palimpsa_data.sources import tables
    if source.format == "parquet":
        _require(source, tables.parquet_columns(source.path), required)
        yield from tables.parquet_rows(source.path, columns, progress)
    elif source.format == "arrow":
        _require(source, tables.arrow_columns(source.path), required)
        yield from tables.arrow_rows(source.path, columns, progress)
    elif source.hub is not None:
        yield from _requiring(source, hub_rows(source.hub, columns), required)
    else:
        yield from _requiring(source, json_rows(source.path, progress), required)
    progress(source.bytes)


def _refuse_mistaken(path: Path, kind: str) -> None:
    with path.open("rb") as file:
        head = file.read(32)
    for magic, what in _MISTAKEN.items():
        if head.startswith(magic) and not (kind == "parquet" and magic == b"PAR1"):
            raise DataError(f"{path} is {what}")


def _requiring(source: Input, rows: Iterator[Row], required: Sequence[Sequence[str]]) -> Iterator[Row]:
    """Rows that say their columns one by one: among the first thousand each group must come up."""
    missing = list(required)
    without = 0
    columns: list[str] = []
    for row in rows:
        if missing and isinstance(row, dict):
            columns = list(row)
            missing = [group for group in missing if not any(name in row for name in group)]
            without += 1
            if without == _ENOUGH_ROWS:
                _require(source, columns, missing)
        yield row
    if without:
        _require(source, columns, missing)


def _require(source: Input, columns: list[str], required: Sequence[Sequence[str]]) -> None:
    for group in required:
        if not any(name in columns for name in group):
            there = ", ".join(columns[:20]) or "none"
            raise DataError(f"{source.path} has no column {' or '.join(group)}; its columns are {there}")
