"""Inputs that are not what their names say, and columns that are not there: one message that names both."""

from __future__ import annotations

import bz2
import itertools
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.data_fixtures import write_array, write_lines, write_parquet
from palimpsa_data import DataError
from palimpsa_data.sources import find_inputs
from palimpsa_data.sources.rows import read_rows


def read(path: Path, required: Sequence[Sequence[str]] = (("text",),)) -> list[Any]:
    (source,) = find_inputs([str(path)])
    return list(read_rows(source, ["text", "n"], lambda _: None, required=required))


ROWS = [{"text": "a", "n": 1}, {"text": "b", "n": None}]


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("x.parquet", write_parquet),
        ("x.jsonl", write_lines),
        ("x.ndjson", write_lines),
        ("x.json", write_lines),
        ("x.json", write_array),
        ("x.jsonl", write_array),
        ("x.jsonl.gz", write_lines),
        ("x.json.zst", write_array),
    ],
)
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str, write: Any) -> None:
    path = write(tmp_path / name, ROWS)
    assert read(path) == ROWS
    assert read(path, [("content", "text"), ("n",)]) == ROWS
    with pytest.raises(DataError, match=rf"{name} has no column content or body; its columns are text, n"):
        read(path, [("text",), ("content", "body")])


def test_saved_datasets_give_the_same_rows(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved") == ROWS
    with pytest.raises(DataError, match=r"data-00000-of-00001\.arrow has no column body; its columns are text, n"):
        read(tmp_path / "saved", [("body",)])


def test_a_column_may_be_missing_in_some_rows(tmp_path: Path) -> None:
    rows: list[Any] = [{"n": 1}, "no json", {"n": 2}, {"text": "a"}]
    assert len(read(write_lines(tmp_path / "x.jsonl", rows))) == 4


def test_a_missing_column_is_found_before_the_whole_file_is_read(tmp_path: Path) -> None:
    (source,) = find_inputs([str(write_lines(tmp_path / "x.jsonl", [{"n": n} for n in range(5000)]))])
    rows = read_rows(source, ["text"], lambda _: None, required=[("text",)])
    assert len(list(itertools.islice(rows, 999))) == 999
    with pytest.raises(DataError, match="has no column text; its columns are n"):
        next(rows)


def test_a_file_of_damaged_rows_alone_is_counted(tmp_path: Path) -> None:
    assert len(read(write_lines(tmp_path / "x.jsonl", ["no", "json"]))) == 2


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl"])
@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (bz2.compress(b'{"text": "x"}'), "packed with bzip2: unpack it"),
        (lzma.compress(b'{"text": "x"}'), "packed with xz: unpack it"),
        (b"\x04\x22\x4d\x18rest", "packed with lz4: unpack it"),
        (b"PK\x03\x04rest", "a zip archive: unpack it"),
        ('{"text": "x"}'.encode("utf-16"), "text in UTF-16"),
    ],
)
def test_what_a_download_may_leave_is_named(tmp_path: Path, name: str, content: bytes, what: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name} is {what}"):
        read(tmp_path / name)


def test_parquet_under_another_name_is_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "x.parquet", ROWS).rename(tmp_path / "x.jsonl")
    with pytest.raises(DataError, match=r"x\.jsonl is a parquet file under another name: rename it"):
        read(tmp_path / "x.jsonl")
