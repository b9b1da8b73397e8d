"""Text under any column's name, and plain text files."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.data_fixtures import write_lines, write_parquet
from helpers.sources import items, skipped, texts
from palimpsa_data import DataError
from palimpsa_data.documents import Document
from palimpsa_data.sources import TextOptions


def test_any_column(tmp_path: Path) -> None:
    rows = [{"body": "A book.", "text": "no"}, {"body": None}, {"body": "Another book."}]
    path = write_parquet(tmp_path / "books.parquet", rows)
    found = items(path, TextOptions(text_column="body", max_length=10))
    assert found[0] == Document("A book.", "books")
    assert skipped(found) == {"null body": 1, "longer than 10 characters": 1}
    with pytest.raises(DataError, match=r"books\.parquet has no column chapter; its columns are body, text"):
        items(path, TextOptions(text_column="chapter"))


def test_text_files(tmp_path: Path) -> None:
    folder = tmp_path / "books"
    folder.mkdir()
    contents = {"b.txt": "Zweites, Öfen.", "a.md": "\ufeff# First", "c.txt": "", "d.txt": "Long, long text."}
    for name, content in contents.items():
        (folder / name).write_text(content, encoding="utf-8")
    (folder / "e.txt").write_bytes(b"caf\xe9")
    found = items(folder, TextOptions(max_length=15))
    assert found[:2] == [Document("# First", "books"), Document("Zweites, Öfen.", "books")]
    assert skipped(found) == {"empty text": 1, "longer than 15 characters": 1, "text is not UTF-8": 1}
    assert items(folder / "b.txt", TextOptions()) == [Document("Zweites, Öfen.", "b")]


def test_a_text_file_that_memory_could_not_hold_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("small")
    with (tmp_path / "b.txt").open("wb") as file:
        file.truncate(2**40)  # takes no room on the disk
    found = items(tmp_path, TextOptions())
    assert texts(found) == ["small"]
    assert skipped(found) == {"text file larger than 128 MiB": 1}


def test_damaged_rows_are_counted(tmp_path: Path) -> None:
    rows = [{"text": "good"}, "no json", b'{"text": "caf\xe9"}', {"text": ["a", "list"]}, {"other": 1}, {"text": "end"}]
    path = write_lines(tmp_path / "x.jsonl.gz", rows)
    found = items(path, TextOptions())
    assert texts(found) == ["good", "end"]
    assert skipped(found) == {"not JSON": 1, "not UTF-8": 1, "text is not a string": 1, "null text": 1}
    path.write_bytes(path.read_bytes()[:-20])
    cut = items(path, TextOptions())
    assert skipped(cut)["gzip ends early"] == 1
    with pytest.raises(DataError, match="not JSON, after 1 good rows; --strict allows no such row"):
        items(path, TextOptions(strict=True))
