"""Files of prompts."""

import json

import pytest

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.inference.prompts import read_prompts


def test_a_prompt_is_a_line_or_the_prompt_of_a_lines_object(tmp_path):
    text = tmp_path / "prompts.txt"
    text.write_bytes("  one \r\ntwo\u2028three\n{}\n".encode())
    assert read_prompts(text) == ["  one ", "two\u2028three", "{}"]
    text.write_text("without an end")
    assert read_prompts(text) == ["without an end"]
    objects = tmp_path / "prompts.jsonl"
    prompts = ["two\nlines", "two\u2028three", "é😀"]
    objects.write_text("".join(json.dumps({"id": 1, "prompt": p}, ensure_ascii=False) + "\n" for p in prompts))
    assert read_prompts(objects) == prompts


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", b"", "line 1: is empty"),
        ("p.txt", b"one\n\nthree\n", "line 2: is empty"),
        ("p.txt", b"\xff\xfe", "cannot read the prompts"),
        ("missing.txt", None, "cannot read the prompts"),
        ("p.jsonl", b'{"prompt": "a"}\n{"text": "b"}\n', 'line 2: .* as "prompt"'),
        ("p.jsonl", b'{"prompt": ""}', "line 1"),
        ("p.jsonl", b'{"prompt": 3}', "line 1"),
        ("p.jsonl", b'["prompt"]', "line 1"),
        ("p.jsonl", b'{"prompt": "\\ud800"}', "line 1"),
        ("p.jsonl", b"[" * 100_000, "line 1"),
    ],
)
def test_what_holds_no_prompt_is_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_prompts(tmp_path / name)
