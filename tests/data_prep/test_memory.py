"""Memory of a process: bounded however large a document is, with the ids of the whole."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.bpe import stdlib_texts, write_tokenizer
from helpers.data_fixtures import fineweb_row, write_fineweb
from palimpsa_data import tokenizers
from palimpsa_data.shards import read_index, read_manifest
from palimpsa_data.sources import streams
from palimpsa_data.tokenizers.json_file import GigatokenTokenizer

LIMIT = 1.5 * 2**20  # kB
RUN = """
import sys
from pathlib import Path
from palimpsa_data.jobs import run_job
from palimpsa_data.plan import PrepJob
from palimpsa_data.sources import FineWebOptions, find_inputs

folder, backend = Path(sys.argv[1]), sys.argv[2]
inputs = find_inputs([str(folder / "in")])
run_job(PrepJob("fineweb", inputs, FineWebOptions(), folder / "tokenizer.json", folder / backend, backend=backend))
print(Path("/proc/self/status").read_text())
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc"),
]


def peak(folder: Path, backend: str) -> int:
    """kB that a process of its own held at most."""
    result = subprocess.run([sys.executable, "-c", RUN, folder, backend], capture_output=True, text=True, check=True)
    return int(re.findall(r"VmHWM:\s*(\d+) kB", result.stdout)[0])


def test_a_document_of_fifty_megabytes(tmp_path: Path) -> None:
    texts = stdlib_texts(100)
    # Python holds a text in four bytes a character for the last one's sake.
    huge = ("\n".join(texts) * 20)[: 50 << 20] + "\U0001f9ff"
    assert len(huge.encode()) > 50 << 20
    write_fineweb(tmp_path / "in/train.parquet", [fineweb_row(text) for text in [*texts, huge, *texts]])
    tokenizer = tokenizers.load(write_tokenizer(tmp_path, 1500))
    assert isinstance(tokenizer, GigatokenTokenizer)
    whole = tokenizer._encode([huge]).ids
    for backend in ("gigatoken", "huggingface"):
        assert peak(tmp_path, backend) < LIMIT
        stem = tmp_path / backend / f"{backend}-00000-of-00001"
        index = read_index(stem.with_suffix(".idx"))
        place = int(np.argmax(index.lengths))
        start, length = int(index.starts[place]), int(index.lengths[place])
        tokens = np.fromfile(stem.with_suffix(".bin"), index.dtype)
        assert np.array_equal(tokens[start : start + length - 1], whole)
        manifest = json.loads(stem.with_suffix(".manifest.json").read_bytes())
        assert (manifest["documents"], manifest["longest"]) == (2 * len(texts) + 1, len(whole) + 1)


def test_the_largest_document_with_an_id_a_byte(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    draw = random.Random(0)
    line = "".join(chr(draw.randrange(0x4E00, 0x9FA5)) for _ in range(999)) + "\uff0c"
    lines = streams.MAX_ROW_BYTES // len(line.encode())
    write_fineweb(tmp_path / "in/train.parquet", [fineweb_row("small"), fineweb_row(line * lines)])
    assert peak(tmp_path, "gigatoken") < LIMIT
    manifest = read_manifest(tmp_path / "gigatoken/gigatoken-00000-of-00001")
    assert (manifest.documents, manifest.longest) == (2, lines * len(line.encode()) + 1)


def test_a_document_that_is_too_large(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    huge = "A sentence of a huge document. " * 8_000_000
    write_fineweb(tmp_path / "in/train.parquet", [fineweb_row("small"), fineweb_row(huge)])
    assert peak(tmp_path, "gigatoken") < LIMIT
    manifest = read_manifest(tmp_path / "gigatoken/gigatoken-00000-of-00001")
    assert manifest.skipped == {"row larger than 128 MiB": 1}
