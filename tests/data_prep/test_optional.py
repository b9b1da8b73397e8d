"""Without the packages of the extra `data`: the demo's kinds of input work, the others say what to install."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.without import without
from palimpsa_data.tokenizers import train_sentencepiece


@pytest.mark.parametrize(
    ("name", "tokenizer", "package"),
    [
        ("rows.parquet", "t.model", "pyarrow"),
        ("rows.jsonl.zst", "t.model", "zstandard"),
        ("a.jsonl", "t.json", "tokenizers"),
    ],
)
def test_what_is_missing_is_said(name: str, tokenizer: str, package: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("{}")
    (tmp_path / "t.model").write_bytes(train_sentencepiece(["some words to learn from " * 9], 290))
    (tmp_path / name).write_bytes({".zst": b"\x28\xb5\x2f\xfd"}.get(name[-4:], b'{"text": "words"}'))
    done = without("prep", "text", tmp_path / name, "--tokenizer", tmp_path / tokenizer, "--output", tmp_path / "out")
    assert done.returncode == 2
    assert f"needs the package {package}, which is not installed: in this project's folder" in done.stderr
    assert ".venv/bin/pip install -e '.[data]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_rows_of_json_need_none_of_them(tmp_path: Path) -> None:
    (tmp_path / "t.model").write_bytes(train_sentencepiece(["some words to learn from " * 9], 290))
    (tmp_path / "a.jsonl").write_text('{"text": "words"}\n')
    done = without(
        "prep", "text", tmp_path / "a.jsonl", "--tokenizer", tmp_path / "t.model", "--output", tmp_path / "o"
    )
    assert done.returncode == 0, done.stderr
    assert "o: 1 document" in done.stdout
