"""What a process holds while it reads huge documents, rows that never end, and little that unpacks to much."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

READ = """
import re, sys
from pathlib import Path
from palimpsa_data.documents import Document
from palimpsa_data.sources import TextOptions, find_inputs, read
(source,) = find_inputs([sys.argv[1]])
documents = sum(isinstance(item, Document) for item in read(source, TextOptions(), lambda _: None))
# Not ru_maxrss, which a process inherits from the one that started it.
print(documents, int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) // 1024)
"""


pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc"),
]


def peak(path: Path, documents: int) -> int:
    """MiB that a process of its own held at most, which must have found so many documents."""
    answer = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True)
    found, mebibytes = map(int, answer.stdout.split())
    assert found == documents
    return mebibytes


def huge_texts() -> Iterator[str]:
    """50 MB of UTF-8 each: plain, with one character that makes every other take four bytes, Chinese."""
    plain = "A sentence of a huge document. " * 1_613_000
    yield plain
    yield plain[:-2] + "\U0001f600"
    yield "一二三四五六七八九十" * 1_667_000


def write_parquet(path: Path) -> None:
    texts = ["small"] * 1000 + list(huge_texts()) + ["small"] * 1000
    pq.write_table(pa.table({"text": texts}), path, row_group_size=3000)


def write_array(path: Path) -> None:
    path.write_text(json.dumps([{"text": text} for text in huge_texts()]))


def write_lines(path: Path) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in huge_texts()))


@pytest.mark.parametrize(
    ("name", "write", "documents"),
    [("x.parquet", write_parquet, 2003), ("x.json", write_array, 3), ("x.jsonl", write_lines, 3)],
)
def test_huge_documents(tmp_path: Path, name: str, write: Callable[[Path], None], documents: int) -> None:
    path = tmp_path / name
    write(path)
    assert peak(path, documents) < 1200


@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_a_row_without_end(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with path.open("wb") as file:
        file.write(b'[{"text": "' if name == "x.json" else b'{"text": "')
        for _ in range(600):
            file.write(b"x" * 2**20)
        file.write(b'"}, {"text": "y"}]' if name == "x.json" else b'"}\n{"text": "y"}\n')
    assert peak(path, 1) < 500


@pytest.mark.parametrize("filler", [b" ", b"x", b"\n"])
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_little_that_unpacks_to_much(tmp_path: Path, suffix: str, filler: bytes) -> None:
    path = tmp_path / f"x.jsonl{suffix}"
    with path.open("wb") as file:
        packed = gzip.GzipFile(fileobj=file, mode="wb", compresslevel=6) if suffix == ".gz" else None
        stream = packed or zstandard.ZstdCompressor().stream_writer(file, closefd=False)
        with stream:
            for _ in range(600):
                stream.write(filler * 2**20)
            stream.write(b'\n{"text": "x"}\n')
    assert path.stat().st_size < 2**21
    assert peak(path, 1) < 500
