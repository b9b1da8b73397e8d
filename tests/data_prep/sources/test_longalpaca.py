"""LongAlpaca: the prompt is Alpaca's, the part that may be shortened is the one with the document."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.data_fixtures import alpaca_rows, write_array, write_bytes, write_lines, write_parquet
from helpers.sources import items, skipped
from palimpsa_data import DataError
from palimpsa_data.documents import Example
from palimpsa_data.instruct import prompt
from palimpsa_data.sources import LongAlpacaOptions


def examples(path: Path) -> list[Example]:
    return [item for item in items(path, LongAlpacaOptions()) if isinstance(item, Example)]


@pytest.mark.parametrize("indent", [None, 4])
def test_every_row_is_an_example(tmp_path: Path, indent: int | None) -> None:
    path = write_array(tmp_path / "LongAlpaca-12k.json", alpaca_rows(), indent=indent)
    found = examples(path)
    rows = [row for row in alpaca_rows() if row["output"]]
    assert [example.prompt for example in found] == [prompt(row["instruction"], row.get("input", "")) for row in rows]
    assert [example.answer for example in found] == [row["output"] for row in rows]
    assert {example.source for example in found} == {"LongAlpaca-12k"}
    assert skipped(items(path, LongAlpacaOptions())) == {"empty output": 1}


def test_the_longer_part_may_be_shortened(tmp_path: Path) -> None:
    instruction, context = "A long instruction, with its document.", "The input, as short."
    rows = [{"instruction": instruction, "input": text, "output": "x"} for text in ("", context, 3 * context)]
    found = examples(write_lines(tmp_path / "x.jsonl", rows))
    assert [example.context for example in found] == [instruction, instruction, 3 * context]
    assert found[1].tail == f"\n\n### Input:\n{context}\n\n### Response:"
    assert found[1].prompt == prompt(instruction, context)


def test_other_formats(tmp_path: Path) -> None:
    whole = examples(write_array(tmp_path / "x.json", alpaca_rows()))
    assert len(whole) == 3
    assert examples(write_lines(tmp_path / "l" / "x.jsonl.gz", alpaca_rows())) == whole
    assert examples(write_parquet(tmp_path / "p" / "x.parquet", alpaca_rows())) == whole


def test_damaged_rows_are_counted(tmp_path: Path) -> None:
    content = b"""[
        {"instruction": "a", "output": "kept"},
        {"instruction": null, "output": "b"},
        {"instruction": "c"},
        {"instruction": ["d"], "output": "d"},
        {"instruction": "e", "input": 5, "output": "e"},
        {"instruction": "  ", "output": "f"},
        {"instruction": "g" "output": "g"},
        {"instruction": "h", "output": "kept"},
        "i",
        {"instruction": "j", "outp"""
    path = write_bytes(tmp_path / "x.json", content)
    assert [example.answer for example in examples(path)] == ["kept", "kept"]
    assert skipped(items(path, LongAlpacaOptions())) == {
        "null instruction": 1,
        "null output": 1,
        "instruction is not a string": 1,
        "input is not a string": 1,
        "empty instruction": 1,
        "not JSON": 1,
        "not a JSON object": 1,
        "array ends early": 1,
    }


def test_other_data_is_refused(tmp_path: Path) -> None:
    path = write_array(tmp_path / "x.json", [{"instruction": "x", "response": "y"}])
    with pytest.raises(DataError, match=r"x\.json has no column output; its columns are instruction, response"):
        items(path, LongAlpacaOptions())
