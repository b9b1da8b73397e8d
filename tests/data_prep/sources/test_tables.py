"""Parquet and Arrow: every row, only the columns that are wanted, damage counted, memory bounded."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.data_fixtures import (
    stack_rows,
    write_damaged_parquet,
    write_invalid_utf8_parquet,
    write_parquet,
)
from palimpsa_data import DataError
from palimpsa_data.sources import streams, tables
from palimpsa_data.sources.streams import BadRow
from palimpsa_data.sources.tables import arrow_columns, arrow_rows, parquet_columns, parquet_rows

ROWS: list[dict[str, Any]] = [{"text": f"text {n}", "n": n, "other": [n, n]} for n in range(8)]


def read(path: Path, *columns: str) -> list[Any]:
    return list(parquet_rows(path, columns, lambda _: None))


def test_rows_of_all_row_groups_in_order(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", ROWS)
    assert pq.read_metadata(path).num_row_groups == 3
    assert read(path, "text", "n", "absent") == [{"text": row["text"], "n": row["n"]} for row in ROWS]
    assert read(path, "other") == [{"other": row["other"]} for row in ROWS]
    assert read(path, "absent") == [{}] * 8
    assert parquet_columns(path) == ["text", "n", "other"]


def test_fields_of_nested_files_are_pruned(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", stack_rows("files content"))
    found = read(path, "files", "content", "language")
    assert [sorted(file) for row in found for file in row["files"]] == [["content", "language"]] * 3
    licenses = read(path, "files", "detected_licenses")
    assert licenses[0]["files"][1] == {"detected_licenses": ["Apache-2.0", "MIT"]}


def test_a_name_may_hold_a_dot(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", [{"meta.text": "a", "n": 1}])
    assert read(path, "meta.text") == [{"meta.text": "a"}]


def test_progress_ends_with_the_whole_file(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", ROWS)
    seen: list[int] = []
    list(parquet_rows(path, ["text"], seen.append))
    size = path.stat().st_size
    assert seen == [size * done // 8 for done in (3, 6, 8)]


@pytest.mark.parametrize("group", [0, 1, 2])
def test_a_damaged_row_group_costs_its_rows(tmp_path: Path, group: int) -> None:
    path = write_damaged_parquet(tmp_path / "x.parquet", ROWS, group=group)
    expected: list[Any] = [{"text": row["text"]} for row in ROWS]
    lost = slice(3 * group, 3 * group + 3)
    expected[lost] = [BadRow("damaged row group")] * len(expected[lost])
    assert read(path, "text") == expected


def test_text_that_is_not_utf8_costs_its_row(tmp_path: Path) -> None:
    path = write_invalid_utf8_parquet(tmp_path / "x.parquet")
    assert read(path, "text") == [{"text": "good"}, BadRow("not UTF-8"), {"text": "also good"}]


@pytest.mark.parametrize("kind", [pa.date32(), pa.timestamp("us"), pa.duration("s")], ids=str)
def test_a_time_that_python_cannot_hold_costs_its_row(tmp_path: Path, kind: pa.DataType) -> None:
    times = pa.array([0, 2**30 if kind == pa.date32() else 2**62]).cast(
        pa.int32() if kind == pa.date32() else pa.int64()
    )
    pq.write_table(pa.table({"text": ["good", "far"], "dump": times.cast(kind)}), tmp_path / "x.parquet")
    first, second = read(tmp_path / "x.parquet", "text", "dump")
    assert isinstance(first, dict)
    assert first["text"] == "good"
    assert second == BadRow("date or time out of range")


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_want_of_memory_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """Rows counted as damaged would be lost: the shard would be complete without them."""

    def rows(batch: pa.RecordBatch) -> Iterator[Any]:
        raise pa.ArrowMemoryError("malloc of size 1 failed")
        yield

    table = pa.table({"text": ["good"]})
    path = tmp_path / f"x{suffix}"
    if suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    monkeypatch.setattr(tables, "_rows", rows)
    with pytest.raises(DataError, match=rf"x\{suffix}: not enough memory"):
        list((parquet_rows if suffix == ".parquet" else arrow_rows)(path, ["text"], lambda _: None))


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1 something PAR1", b"no parquet at all"])
def test_what_is_no_parquet_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"x\.parquet is not a whole parquet file"):
        read(path, "text")
    with pytest.raises(DataError, match=r"x\.parquet is not a whole parquet file"):
        parquet_columns(path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", ROWS)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"x\.parquet is not a whole parquet file .*fetch it again"):
        read(path, "text")


def test_an_empty_table_has_no_rows(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", [], schema=pa.schema([("text", pa.string())]))
    assert read(path, "text") == []


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_arrow_rows(tmp_path: Path, kind: str) -> None:
    table = pa.Table.from_pylist(ROWS)
    path = tmp_path / "x.arrow"
    writer = (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(str(path), table.schema)
    with writer:
        writer.write_table(table, max_chunksize=3)
    seen: list[int] = []
    assert list(arrow_rows(path, ["text", "absent"], seen.append)) == [{"text": row["text"]} for row in ROWS]
    assert len(seen) == 3
    assert arrow_columns(path) == ["text", "n", "other"]
    path.write_bytes(path.read_bytes()[:-200] if kind == "file" else b"nothing of this kind")
    with pytest.raises(DataError, match=r"x\.arrow is not a whole Arrow file"):
        list(arrow_rows(path, ["text"], seen.append))


def test_huge_documents_side_by_side_are_not_held_twice(tmp_path: Path) -> None:
    """The average row is small, so that all eight documents of 8 MB come in one batch."""
    schema = pa.schema([("text", pa.string())])
    path = tmp_path / "x.parquet"
    texts = ["small"] * 1000 + [str(number) * 2**23 for number in range(8)]
    pq.write_table(pa.table({"text": texts}, schema), path)
    tracemalloc.start()
    assert all(
        row == {"text": text} for row, text in zip(parquet_rows(path, ["text"], lambda _: None), texts, strict=True)
    )
    assert tracemalloc.get_traced_memory()[1] < 24 * 2**20
    tracemalloc.stop()


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_text_that_memory_could_not_hold_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(streams, "MAX_ROW_BYTES", 2**25)
    large, allowed = "x" * (2**25 + 1), "x" * (2**25 - 8)
    rows: list[dict[str, Any]] = [
        {"text": "small", "files": None},
        {"text": large, "files": None},
        {"text": allowed, "files": None},
    ]
    rows.append({"text": "many files", "files": [{"text": allowed[::2]}] * 3})
    table = pa.Table.from_pylist(rows)
    path = tmp_path / f"x{suffix}"
    if suffix == ".parquet":
        pq.write_table(table, path)
        found = read(path, "text", "files")
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
        found = list(arrow_rows(path, ["text", "files"], lambda _: None))
    assert found == [rows[0], BadRow("row larger than 32 MiB"), *rows[2:]]


def test_memory_is_bounded_by_rows_not_by_row_groups(tmp_path: Path) -> None:
    """One row group of 80 MB: ten times what is held at once."""
    path = tmp_path / "x.parquet"
    piece = random.Random(0).randbytes(50_000).hex()
    schema = pa.schema([("text", pa.string())])
    # What cannot be split is a page; this writer ends one after each eighth row.
    with pq.ParquetWriter(path, schema, compression="zstd", write_batch_size=8) as writer:
        writer.write_table(pa.table({"text": [piece + str(n) for n in range(800)]}, schema), row_group_size=800)
    assert pq.read_metadata(path).num_row_groups == 1
    before = pa.total_allocated_bytes()
    most = 0
    tracemalloc.start()
    for row in parquet_rows(path, ["text"], lambda _: None):
        assert isinstance(row, dict)
        most = max(most, pa.total_allocated_bytes() - before)
    _, python = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 64 * 2**20
    assert python < 32 * 2**20
