"""The Stack v2: every shape gives the same documents, every encoding is decoded or counted."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from helpers.data_fixtures import (
    ENCODED,
    stack_blobs,
    stack_file,
    stack_files,
    stack_rows,
    write_array,
    write_blobs,
    write_bytes,
    write_lines,
    write_parquet,
)
from helpers.sources import items, skipped, texts
from palimpsa_data import DataError
from palimpsa_data.documents import Document
from palimpsa_data.sources import StackV2Options, blobs

ALL = [
    Document("print(1)\n", "Python"),
    Document("int main() { return 0; }\n", "C"),
    Document("-- query\n", "SQL"),
]
WITH_CONTENT = ["flat content", "flat bytes", "files content", "files text"]
FORMATS = [
    ("x.parquet", write_parquet),
    ("x.jsonl.gz", write_lines),
    ("x.jsonl.zst", write_lines),
    ("x.json", write_array),
]


@pytest.mark.parametrize(
    ("shape", "name", "write"),
    # JSON has no bytes.
    [("flat bytes", *FORMATS[0])]
    + [(shape, *form) for shape in WITH_CONTENT if "bytes" not in shape for form in FORMATS],
)
def test_every_shape_with_content(tmp_path: Path, shape: str, name: str, write: Any) -> None:
    assert items(write(tmp_path / name, stack_rows(shape)), StackV2Options()) == ALL


@pytest.mark.parametrize(("name", "write"), FORMATS)
@pytest.mark.parametrize("shape", ["flat ids", "files ids"])
def test_ids_without_their_blobs_are_one_message(tmp_path: Path, shape: str, name: str, write: Any) -> None:
    path = write(tmp_path / name, stack_rows(shape))
    with pytest.raises(DataError, match=rf"{name} holds ids only .*--blobs FOLDER"):
        items(path, StackV2Options())


@pytest.mark.parametrize("layout", ["content/{}", "content/{}.gz", "{}", "{}.gz"])
@pytest.mark.parametrize("shape", ["flat ids", "files ids"])
def test_ids_with_their_blobs(tmp_path: Path, shape: str, layout: str) -> None:
    folder = write_blobs(tmp_path / "swh", stack_blobs(), layout=layout)
    path = write_parquet(tmp_path / "x.parquet", stack_rows(shape))
    assert items(path, StackV2Options(blobs=str(folder))) == ALL


def test_blobs_among_the_inputs_come_once(tmp_path: Path) -> None:
    write_blobs(tmp_path / "stack", stack_blobs())
    write_parquet(tmp_path / "stack" / "x.parquet", stack_rows("flat ids"))
    assert items(tmp_path / "stack", StackV2Options(blobs=str(tmp_path / "stack"))) == ALL


def test_blobs_that_are_not_packed_or_not_whole_or_not_there(tmp_path: Path) -> None:
    rows = [stack_file(name) for name in ("plain", "packed twice", "cut", "damaged", "absent")]
    ids = [row["blob_id"] for row in rows]
    packed = gzip.compress(b"content " * 50)
    contents = [
        b"plain\n",
        gzip.compress(b"packed ") + gzip.compress(b"twice\n"),
        packed[:-12],
        packed[:5] + b"\xff" * 9,
    ]
    folder = tmp_path / "swh"
    for blob_id, content in zip(ids, contents, strict=False):
        write_bytes(folder / blob_id, content)
    rows += [{**rows[0], "blob_id": "../../etc/passwd"}, {**rows[0], "blob_id": None}]
    found = items(write_lines(tmp_path / "x.jsonl", rows), StackV2Options(blobs=str(folder)))
    assert texts(found) == ["plain\n", "packed twice\n"]
    assert skipped(found) == {
        "gzip ends early": 1,
        "gzip is damaged": 1,
        "blob is not in the folder": 1,
        "blob_id is not 40 hexadecimal digits": 2,
    }


def test_a_blob_that_memory_could_not_hold_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "MAX_BLOB_BYTES", 2**20)
    row = stack_file("x")
    folder = write_blobs(tmp_path / "swh", {row["blob_id"]: b"x" * (2**20 + 1)})
    found = items(write_lines(tmp_path / "x.jsonl", [row]), StackV2Options(blobs=str(folder)))
    assert skipped(found) == {"blob larger than 1 MiB": 1}


def test_a_blob_file_that_memory_could_not_hold_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_blobs(tmp_path / "swh", {"0" * 40: b"small"}, layout="{}")
    with (folder / ("1" * 40)).open("wb") as file:
        file.truncate(2**40)  # takes no room on the disk
    found = items(folder, StackV2Options())
    assert texts(found) == ["small"]
    assert skipped(found) == {"blob larger than 128 MiB": 1}


def test_blobs_alone(tmp_path: Path) -> None:
    folder = write_blobs(tmp_path / "swh", {**stack_blobs(), "0" * 40: b"caf\xe9"}, layout="{}.gz")
    found = items(folder, StackV2Options())
    assert sorted(texts(found)) == sorted(stack_files())
    assert {item.source for item in found if isinstance(item, Document)} == {"unknown"}
    assert skipped(found) == {"content is not in its source encoding": 1}
    for filters in ({"languages": ("C",)}, {"license_types": ("permissive",)}, {"licenses": ("MIT",)}):
        with pytest.raises(DataError, match="blobs alone say neither language nor licence"):
            items(folder, StackV2Options(**filters))


def test_a_folder_of_blobs_that_is_not_there(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", stack_rows("flat ids"))
    with pytest.raises(DataError, match=r"--blobs .*absent: there is no such folder"):
        items(path, StackV2Options(blobs=str(tmp_path / "absent")))


@pytest.mark.parametrize("where", ["column", "blob"])
def test_every_source_encoding(tmp_path: Path, where: str) -> None:
    rows = [stack_file(str(number), src_encoding=name) for number, (_, name, _) in enumerate(ENCODED)]
    contents = {row["blob_id"]: content for row, (_, _, content) in zip(rows, ENCODED, strict=True)}
    options = StackV2Options()
    if where == "column":
        rows = [{**row, "content": contents[row["blob_id"]]} for row in rows]
    else:
        options = StackV2Options(blobs=str(write_blobs(tmp_path / "swh", contents)))
    found = items(write_parquet(tmp_path / "x.parquet", rows), options)
    assert texts(found) == [text for text, _, _ in ENCODED]


def test_bytes_that_are_not_in_their_encoding_are_counted(tmp_path: Path) -> None:
    wrong = [
        ("UTF-8", b"caf\xe9"),
        (None, b"caf\xe9"),
        ("UTF-16LE", b"x"),
        ("Shift_JIS", b"\xff\xff"),
        ("UTF-7", b"half a pair: +2D0-"),
        ("no-such-encoding", b"x"),
        ("EUC-TW", b"x"),
        ("hex", b"x"),
        ("undefined", b"x"),
        ("ut\0f", b"x"),
    ]
    rows = [{**stack_file("x", src_encoding=name), "content": content} for name, content in wrong]
    found = items(write_parquet(tmp_path / "x.parquet", rows), StackV2Options())
    assert texts(found) == []
    assert sum(skipped(found).values()) == len(wrong)
    assert set(skipped(found)) == {
        "content is not in its source encoding",
        "source encoding that Python does not know",
    }


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"languages": ("python", "SQL")}, [0, 2]),
        ({"license_types": ("permissive",)}, [0, 1]),
        ({"license_types": ("permissive", "no_license")}, [0, 1, 2]),
        ({"licenses": ("MIT",)}, [0]),
        ({"licenses": ("mit", "Apache-2.0")}, [0, 1]),
        ({"min_length": 10}, [1]),
        ({"max_length": 10}, [0, 2]),
    ],
)
@pytest.mark.parametrize("shape", [*WITH_CONTENT, "flat ids", "files ids"])
def test_filters(tmp_path: Path, shape: str, filters: dict[str, Any], kept: list[int]) -> None:
    folder = write_blobs(tmp_path / "swh", stack_blobs())
    path = write_parquet(tmp_path / "x.parquet", stack_rows(shape))
    found = items(path, StackV2Options(**filters, blobs=str(folder)))
    assert [item for item in found if isinstance(item, Document)] == [ALL[number] for number in kept]
    assert sum(skipped(found).values()) == 3 - len(kept)


def test_unwanted_files_are_not_looked_for(tmp_path: Path) -> None:
    (tmp_path / "swh").mkdir()
    path = write_parquet(tmp_path / "x.parquet", stack_rows("flat ids"))
    found = items(path, StackV2Options(blobs=str(tmp_path / "swh"), languages=("SQL",)))
    assert skipped(found) == {"language is not SQL": 2, "blob is not in the folder": 1}


def test_what_no_filter_can_be_is_refused() -> None:
    with pytest.raises(DataError, match="--license-types takes permissive and no_license, not 'MIT'"):
        StackV2Options(license_types=("MIT",))


def test_hostile_rows_are_counted(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"content": None, "language": "C"},
        {"content": "", "language": "C"},
        {"content": 7},
        {"content": "no language"},
        {"files": None},
        {"files": "no list"},
        {"files": []},
        {"files": [None, {"content": "inside"}, {"path": "/no/content"}], "language": "C"},
        {"content": None, "text": "second name"},
        {"content": "licences", "detected_licenses": "MIT", "language": ["C"]},
    ]
    found = items(write_lines(tmp_path / "x.jsonl", rows), StackV2Options())
    assert [(item.text, item.source) for item in found if isinstance(item, Document)] == [
        ("no language", "unknown"),
        ("inside", "C"),
        ("second name", "unknown"),
        ("licences", "unknown"),
    ]
    assert skipped(found) == {
        "null content": 2,
        "empty content": 1,
        "content is not a string": 1,
        "null files": 1,
        "files is not a list": 1,
        "file is not an object": 1,
    }


def test_other_data_is_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", [{"body": "x"}])
    with pytest.raises(DataError, match="has no column content or text or files or blob_id; its columns are body"):
        items(path, StackV2Options())
