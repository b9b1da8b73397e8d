"""Small files in the shapes that published data sets have, and in those that they should not have."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

LITERAL_EOD = "before <|endoftext|> after </s> end"

# What a row of FineWeb-Edu holds; `text` alone is sure to be there.
FINEWEB_SCHEMA = pa.schema(
    [
        ("text", pa.string()),
        ("id", pa.string()),
        ("dump", pa.string()),
        ("url", pa.string()),
        ("file_path", pa.string()),
        ("language", pa.string()),
        ("language_score", pa.float64()),
        ("token_count", pa.int64()),
        ("score", pa.float64()),
        ("int_score", pa.int64()),
    ]
)


def fineweb_row(text: Any, **values: Any) -> dict[str, Any]:
    row = {
        "text": text,
        "id": "<urn:uuid:0>",
        "dump": "CC-MAIN-2024-10",
        "url": "https://example.org",
        "file_path": "s3://commoncrawl/0.warc.gz",
        "language": "en",
        "language_score": 0.95,
        "token_count": 7,
        "score": 3.2,
        "int_score": 3,
    }
    return {**row, **values}


def fineweb_rows() -> list[dict[str, Any]]:
    """Nine rows: ordinary, null, empty, blank, literal end-of-document marks, other languages, low and null scores."""
    return [
        fineweb_row("The first document."),
        fineweb_row(None),
        fineweb_row(""),
        fineweb_row(" \n\t"),
        fineweb_row(LITERAL_EOD),
        fineweb_row("Ein Satz über Öfen.", language="de", language_score=0.6),
        fineweb_row("Low.", score=0.4, int_score=0),
        fineweb_row("Unscored.", score=None, int_score=None, language_score=None),
        fineweb_row("Another dump.", dump="CC-MAIN-2019-04"),
    ]


def write_parquet(path: Path, rows: Sequence[dict[str, Any]], *, row_group: int = 3, schema: Any = None) -> Path:
    """With the 9 rows of `fineweb_rows` three row groups."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if schema is None:
        names = dict.fromkeys(name for row in rows for name in row)
        table = pa.table({name: [row.get(name) for row in rows] for name in names})
    else:
        table = pa.Table.from_pylist(list(rows), schema=schema)
    pq.write_table(table, path, row_group_size=row_group)
    return path


def write_fineweb(path: Path, rows: Sequence[dict[str, Any]] | None = None) -> Path:
    return write_parquet(path, fineweb_rows() if rows is None else rows, schema=FINEWEB_SCHEMA)


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    """One row a line; bytes and strings go in as they are. Compressed as the name says."""
    lines = [row if isinstance(row, bytes) else row.encode() if isinstance(row, str) else dump(row) for row in rows]
    return write_bytes(path, b"".join(line + b"\n" for line in lines))


def write_array(path: Path, rows: Sequence[Any], *, indent: int | None = None) -> Path:
    return write_bytes(path, json.dumps(list(rows), indent=indent).encode())


def write_bytes(path: Path, content: bytes) -> Path:
    """Compressed as the name says."""
    import zstandard

    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    elif path.suffix == ".zst":
        content = zstandard.compress(content)
    path.write_bytes(content)
    return path


def dump(row: Any) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode()


def write_damaged_parquet(path: Path, rows: Sequence[dict[str, Any]], *, group: int) -> Path:
    """Three rows a group; in one of them the pages of every column are overwritten."""
    write_parquet(path, rows)
    metadata = pq.read_metadata(path).row_group(group)
    content = bytearray(path.read_bytes())
    for number in range(metadata.num_columns):
        column = metadata.column(number)
        start = column.dictionary_page_offset or column.data_page_offset
        content[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(content)
    return path


def write_invalid_utf8_parquet(path: Path) -> Path:
    """Three rows, the middle one with a text that is no UTF-8."""
    texts = pa.array([b"good", b"caf\xe9", b"also good"], pa.binary())
    table = pa.table({"text": pa.Array.from_buffers(pa.string(), 3, texts.buffers())})
    pq.write_table(table, path)
    return path


# Text, the name that a detector gives its encoding, and its bytes.
ENCODED = [
    ("print('plain')\n", "UTF-8", b"print('plain')\n"),
    ("x = 'marked'\n", "UTF-8", b"\xef\xbb\xbfx = 'marked'\n"),
    ("# caf\xe9\n", "ISO-8859-1", b"# caf\xe9\n"),
    ("# \u20ac\n", "windows-1252", b"# \x80\n"),
    ("# \u0437\u0430\n", "windows-1251", b"# \xe7\xe0\n"),
    ("# \u0437\u0430\n", "KOI8-R", b"# \xda\xc1\n"),
    ("# \u4e2d\n", "GB18030", b"# \xd6\xd0\n"),
    ("# \u4e2d\n", "Big5", b"# \xa4\xa4\n"),
    ("# \u65e5\n", "Shift_JIS", b"# \x93\xfa\n"),
    ("# \u65e5\n", "EUC-JP", b"# \xc6\xfc\n"),
    ("# \ud55c\n", "EUC-KR", b"# \xc7\xd1\n"),
    ("# \u65e5\n", "ISO-2022-JP", b"# \x1b$BF|\x1b(B\n"),
    ("# u\n", "UTF-16LE", b"\xff\xfe#\x00 \x00u\x00\n\x00"),
    ("# u\n", "UTF-16BE", b"\x00#\x00 \x00u\x00\n"),
    ("# u\n", "UTF-16", b"\xff\xfe#\x00 \x00u\x00\n\x00"),
    ("# u\n", "UTF-32LE", b"#\x00\x00\x00 \x00\x00\x00u\x00\x00\x00\n\x00\x00\x00"),
    ("# \u05d0\n", "ISO-8859-8-I", b"# \xe0\n"),
    ("# \u0e01\n", "windows-874", b"# \xa1\n"),
    ("\u05d0", "IBM424_rtl", b"\x41"),
    ("# \xe9\n", "macintosh", b"# \x8e\n"),
]


def stack_file(content: str, **values: Any) -> dict[str, Any]:
    """What the rows say of a source file, without its content; `blob_id` is made from it."""
    file = {
        "blob_id": hashlib.sha1(content.encode()).hexdigest(),
        "path": "/src/main.py",
        "src_encoding": "UTF-8",
        "language": "Python",
        "license_type": "permissive",
        "detected_licenses": ["MIT"],
        "length_bytes": len(content.encode()),
    }
    return {**file, **values}


def stack_files() -> dict[str, dict[str, Any]]:
    """Content -> what the rows say of it."""
    return {
        "print(1)\n": stack_file("print(1)\n"),
        "int main() { return 0; }\n": stack_file(
            "int main() { return 0; }\n", language="C", detected_licenses=["Apache-2.0", "MIT"]
        ),
        "-- query\n": stack_file("-- query\n", language="SQL", license_type="no_license", detected_licenses=[]),
    }


def stack_rows(shape: str) -> list[dict[str, Any]]:
    """The three files of `stack_files` in one of the shapes that they are published or kept in."""
    files = stack_files()
    match shape:
        case "flat content":
            return [{**file, "content": content} for content, file in files.items()]
        case "flat bytes":
            return [{**file, "content": content.encode()} for content, file in files.items()]
        case "files content" | "files text":
            name = shape.split()[1]
            inner = [{**file, name: content} for content, file in files.items()]
            return [{"repo_name": "a/b", "files": inner[:2]}, {"repo_name": "c/d", "files": inner[2:]}]
        case "flat ids":
            return list(files.values())
        case "files ids":
            inner = list(files.values())
            return [{"repo_name": "a/b", "files": inner[:2]}, {"repo_name": "c/d", "files": inner[2:]}]
    raise ValueError(shape)


def write_blobs(folder: Path, contents: dict[str, bytes], *, layout: str = "content/{}") -> Path:
    """Blobs by id, gzipped: "content/{}", "{}.gz" and the like."""
    for blob_id, content in contents.items():
        path = folder / layout.format(blob_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(content, mtime=0))
    return folder


def stack_blobs() -> dict[str, bytes]:
    return {file["blob_id"]: content.encode() for content, file in stack_files().items()}


def alpaca_rows() -> list[dict[str, Any]]:
    """With and without input, an empty output, an over-long document whose question follows it."""
    document = " ".join(f"Sentence {number} of the paper." for number in range(2000))
    return [
        {"instruction": "Name a colour.", "output": "Blue."},
        {"instruction": "Sum up.", "input": "A long text.", "output": "Short."},
        {"instruction": "Say nothing.", "input": "", "output": ""},
        {"instruction": f"Read the paper.\n{document}\nWhat is sentence 7 of?", "output": "Of the paper."},
    ]
