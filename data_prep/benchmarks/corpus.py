"""Text that this machine has, as FineWeb-shaped and Stack-v2-shaped parquet files, and a tokenizer of 50,277 ids.

Code is the Python files of the running environment, prose their docstrings: enough for some 100 MB each where PyTorch
and Transformers are installed. Everything is kept in the folder and made once.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from palimpsa_data.files import write_atomically
from palimpsa_data.tokenizers import train_json

VOCAB_SIZE = 50277
_DOCSTRING = re.compile(r'"""(.{200,}?)"""', re.DOTALL)
_DOCUMENT = 3500  # characters of a document of prose; FineWeb's mean is about that
_LONGEST_FILE = 1 << 18
_ROW_GROUP = 1000
_TRAINING_BYTES = 12 << 20


def parquet_file(folder: Path, kind: str, size: int) -> Path:
    """A parquet file with up to `size` bytes of text, `prose` or `code`, in the columns that are published."""
    path = folder / f"{kind}-{size >> 20}MB.parquet"
    if not path.exists():
        texts = list(_taken(_prose() if kind == "prose" else _code(), size))
        temporary = path.with_suffix(".tmp")
        pq.write_table(_table(kind, texts), temporary, row_group_size=_ROW_GROUP, compression="zstd")
        temporary.rename(path)
    return path


def texts_of(path: Path) -> list[str]:
    table = pq.read_table(path)
    return table["text" if "text" in table.column_names else "content"].to_pylist()


def tokenizer_file(folder: Path) -> Path:
    """A tokenizer of the GPT-NeoX type, trained on code and prose."""
    path = folder / "tokenizer.json"
    if not path.exists():
        texts = [*_taken(_prose(), _TRAINING_BYTES), *_taken(_code(), _TRAINING_BYTES)]
        write_atomically(path, train_json(texts, VOCAB_SIZE))
    return path


def _table(kind: str, texts: list[str]) -> pa.Table:
    count = len(texts)
    if kind == "code":
        return pa.table({"content": texts, "language": ["Python"] * count, "license_type": ["permissive"] * count})
    ids = [f"<urn:uuid:{number:032x}>" for number in range(count)]
    urls = [f"https://example.org/{number}" for number in range(count)]
    return pa.table(
        {"text": texts, "id": ids, "dump": ["CC-MAIN-2024-10"] * count, "url": urls, "score": [3.0] * count}
    )


def _taken(texts: Iterator[str], size: int) -> Iterator[str]:
    seen: set[bytes] = set()
    for text in texts:
        digest = hashlib.sha256(text.encode()).digest()
        if digest in seen:
            continue
        seen.add(digest)
        yield text
        size -= len(text.encode())
        if size <= 0:
            return


def _code() -> Iterator[str]:
    paths = sysconfig.get_paths()
    for root in (paths["stdlib"], paths["purelib"]):
        for path in sorted(Path(root).rglob("*.py")):
            if 200 < path.stat().st_size < _LONGEST_FILE:
                yield path.read_bytes().decode("utf-8", "replace")


def _prose() -> Iterator[str]:
    document = ""
    for code in _code():
        for match in _DOCSTRING.finditer(code):
            document += re.sub(r"\n[ \t]+", "\n", match[1]).strip() + "\n\n"
            if len(document) > _DOCUMENT:
                yield document
                document = ""
