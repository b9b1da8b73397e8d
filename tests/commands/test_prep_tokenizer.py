"""`prep tokenizer`: both kinds, from equally much of each input, never over a file that is there."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.bpe import stdlib_texts
from helpers.data_fixtures import write_lines
from palimpsa_data import tokenizers
from palimpsa_data.sources import TextOptions, find_inputs
from palimpsa_data.tokenizers.from_inputs import TrainingText

from megatron_palimpsa import cli


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    for number, text in enumerate(stdlib_texts(3)):
        lines = text[:40_000].split("\n\n")
        write_lines(tmp_path / f"in/{number}.jsonl", [{"body": line} for line in lines] + ["not JSON"])
    return tmp_path / "in"


@pytest.mark.parametrize(("name", "size"), [("tokenizer.json", 400), ("tokenizer.model", 400)])
def test_it_writes_a_tokenizer(inputs: Path, capsys: pytest.CaptureFixture[str], name: str, size: int) -> None:
    path = inputs.parent / "made" / name
    command = ["prep", "tokenizer", str(inputs), "--text-column", "body", "--vocab-size", str(size)]
    assert cli.main([*command, "--output", str(path)]) == 0
    assert f"{path}: {size} ids, from" in capsys.readouterr().out
    tokenizer = tokenizers.load(path)
    assert tokenizer.vocab_size == size
    text = "def f(self):\n        return 1  # <|endoftext|>\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    before = path.read_bytes()
    assert cli.main([*command, "--output", str(path)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert cli.main([*command, "--output", str(path.with_name(f"again{path.suffix}"))]) == 0
    assert path.read_bytes() == before == path.with_name(f"again{path.suffix}").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "t.txt", "--vocab-size", "400"], "a .json (byte-level, GPT-NeoX type) or a .model"),
        (["--output", "t.json", "--vocab-size", "100000"], "the text gives"),
        (["--output", "t.model", "--vocab-size", "100000"], "cannot train a tokenizer with 100000 ids"),
        (["--output", "t.json", "--vocab-size", "20"], "at least 300 are needed"),
        (["--output", "t.json", "--vocab-size", "300", "--text-column", ""], "--text-column must name a column"),
    ],
)
def test_what_cannot_be_is_one_message(
    inputs: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(inputs.parent)
    assert cli.main(["prep", "tokenizer", str(inputs), "--text-column", "body", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not list(inputs.parent.glob("t.*"))


@pytest.mark.parametrize("size", ["0", "-5"])
def test_no_text_at_all_is_refused(inputs: Path, capsys: pytest.CaptureFixture[str], size: str) -> None:
    flags = ["--output", str(inputs.parent / "t.json"), "--vocab-size", "300", "--megabytes", size]
    with pytest.raises(SystemExit, match="2"):
        cli.main(["prep", "tokenizer", str(inputs), *flags])
    assert f"--megabytes: must be an integer from 1, not {size}" in capsys.readouterr().err
    assert not (inputs.parent / "t.json").exists()


def test_equally_much_of_each_input(inputs: Path) -> None:
    short = write_lines(inputs / "0.jsonl", [{"body": "only this"}])
    options = TextOptions(text_column="body")
    text = TrainingText(find_inputs([str(inputs)], options.loose), options, 12_000)
    found = list(text)
    assert short.stat().st_size < 100
    assert found[0] == "only this"
    assert text.documents == len(found)
    assert 12_000 <= text.bytes == sum(len(part.encode()) for part in found) < 20_000
    second = [part for part in stdlib_texts(2)[1][:40_000].split("\n\n") if part in found]
    assert 5_900 < sum(len(part.encode()) for part in second) < 10_000
