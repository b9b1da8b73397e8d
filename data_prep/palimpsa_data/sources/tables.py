"""Parquet and Arrow files to rows, a few MiB at a time and only the columns that are wanted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from palimpsa_data.errors import DataError
from palimpsa_data.sources import streams
from palimpsa_data.sources.streams import BadRow

_BATCH_BYTES = 8 * 2**20
_MOST_ROWS = 1024
# What the writers call the levels of a list, between the names of the fields.
_LIST_LEVELS = {"array", "array_element", "bag", "element", "item", "list"}

Row = dict[str, Any] | BadRow


def parquet_rows(path: Path, columns: Collection[str], progress: Callable[[int], None]) -> Iterator[Row]:
    """Rows with those of `columns` that there are; of a list of structs, those fields that are among them too.

    A row group that cannot be read counts as so many bad rows, a row with a value of more than `MAX_ROW_BYTES` as one.
    `progress` gets the file's bytes in proportion.

    Raises:
        DataError: the file is not parquet, or cannot be read.
    """
    try:
        file = pq.ParquetFile(path, buffer_size=_BATCH_BYTES, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a whole parquet file ({_first_line(error)}): fetch it again") from None
    with file:
        wanted = [number for number in range(len(file.schema)) if _is_wanted(file.schema.column(number).path, columns)]
        leaves = [file.schema.column(number).path for number in wanted]
        done, size = 0, path.stat().st_size
        for group in range(file.num_row_groups):
            metadata = file.metadata.row_group(group)
            held = sum(metadata.column(number).total_uncompressed_size for number in wanted)
            read = 0
            try:
                batches = file.iter_batches(
                    _rows_at_once(metadata.num_rows, held), row_groups=[group], columns=leaves, use_threads=False
                )
                for batch in batches:
                    yield from _rows(batch)
                    read += batch.num_rows
                    progress(size * (done + read) // file.metadata.num_rows)
            except MemoryError as error:
                raise _no_memory(path) from error
            except (pa.ArrowException, OSError) as error:
                if getattr(error, "errno", None):
                    raise DataError(f"cannot read {path}: {error}") from None
                for _ in range(metadata.num_rows - read):
                    yield BadRow("damaged row group")
            done += metadata.num_rows


def parquet_columns(path: Path) -> list[str]:
    """Names of the columns; see `parquet_rows` for what is raised."""
    try:
        return list(pq.read_schema(path).names)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a whole parquet file ({_first_line(error)}): fetch it again") from None


def arrow_rows(path: Path, columns: Collection[str], progress: Callable[[int], None]) -> Iterator[Row]:
    """Rows of an Arrow stream or file, as `datasets` saves them; see `parquet_rows`."""
    try:
        with pa.memory_map(str(path)) as source:
            for batch in _arrow_batches(path, source):
                chosen = batch.select([name for name in batch.schema.names if name in columns])
                step = _rows_at_once(chosen.num_rows, chosen.nbytes)
                for start in range(0, chosen.num_rows, step):
                    yield from _rows(chosen.slice(start, step))
                progress(source.tell())
    except MemoryError as error:
        raise _no_memory(path) from error
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a whole Arrow file ({_first_line(error)}): fetch it again") from None


def arrow_columns(path: Path) -> list[str]:
    """Names of the columns; see `arrow_rows` for what is raised."""
    try:
        with pa.memory_map(str(path)) as source:
            return list(_open_arrow(path, source).schema.names)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a whole Arrow file ({_first_line(error)}): fetch it again") from None


def _open_arrow(path: Path, source: pa.NativeFile) -> Any:
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    return pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)


def _arrow_batches(path: Path, source: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    reader = _open_arrow(path, source)
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        return (reader.get_batch(number) for number in range(reader.num_record_batches))
    return iter(reader)


def _is_wanted(path: str, columns: Collection[str]) -> bool:
    first, *others = path.split(".")
    return path in columns or (first in columns and all(name in columns or name in _LIST_LEVELS for name in others))


def _rows_at_once(rows: int, size: int) -> int:
    return max(1, min(_MOST_ROWS, rows * _BATCH_BYTES // max(size, 1)))


def _rows(batch: pa.RecordBatch) -> Iterator[Row]:
    if batch.num_rows == 1 and any(map(_is_too_large, batch.columns)):
        yield streams.too_large()
        return
    names = batch.schema.names
    columns: list[list[Any]] | None = None
    reason = ""
    # Huge documents among the rows are not to be held twice all at once.
    if batch.num_rows == 1 or batch.nbytes <= 2 * _BATCH_BYTES:
        try:
            columns = [column.to_pylist() for column in batch.columns]
        except UnicodeDecodeError:
            reason = "not UTF-8"
        except (ValueError, OverflowError):  # Python's dates end with the year 9999
            reason = "date or time out of range"
    if columns is None and batch.num_rows == 1:
        yield BadRow(reason)
        return
    if columns is None:
        half = batch.num_rows // 2
        yield from _rows(batch.slice(0, half))
        yield from _rows(batch.slice(half))
        return
    # A batch may have rows and none of the columns.
    values = zip(*columns, strict=True) if columns else (() for _ in range(batch.num_rows))
    for row in values:
        yield dict(zip(names, row, strict=True))


def _is_too_large(column: pa.Array) -> bool:
    # A repository's files may well be more together: only a single value is one document.
    return not pa.types.is_nested(column.type) and column.nbytes > streams.MAX_ROW_BYTES


def _no_memory(path: Path) -> DataError:
    return DataError(f"{path}: not enough memory to read it; run fewer --processes, or where there is more")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["no reason given"])[0]
