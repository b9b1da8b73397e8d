"""`prep fineweb|stackv2|text|longalpaca`: flags to options, shards that hold what was asked for, one message if not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from helpers.bpe import write_tokenizer
from helpers.data_fixtures import (
    LITERAL_EOD,
    alpaca_rows,
    stack_blobs,
    stack_rows,
    write_array,
    write_blobs,
    write_bytes,
    write_fineweb,
    write_lines,
    write_parquet,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset
from palimpsa_data import tokenizers
from palimpsa_data.instruct import prompt
from palimpsa_data.shards import read_manifest
from palimpsa_data.sources import FineWebOptions, LongAlpacaOptions, StackV2Options, TextOptions

from megatron_palimpsa import cli

OPTIONS = {
    "fineweb": FineWebOptions,
    "stackv2": StackV2Options,
    "text": TextOptions,
    "longalpaca": LongAlpacaOptions,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def prepare(kind: str, source: Path, output: Path, tokenizer: Path, *flags: str) -> int:
    arguments = ["prep", kind, str(source), "--output", str(output), "--tokenizer", str(tokenizer), *flags]
    return cli.main([*arguments, "--backend", "huggingface"])


def texts(output: Path, tokenizer: Path) -> list[str]:
    """Every document of every shard, decoded without its end."""
    loaded = tokenizers.load(tokenizer, backend="huggingface")
    found = []
    for path in sorted(output.glob("*.bin")):
        if path.name.endswith(".mask.bin"):
            continue
        dataset = IndexedDataset(str(path.with_suffix("")))
        for number in range(len(dataset)):
            ids = dataset[number].tolist()
            assert ids[-1] == loaded.eod_id
            assert loaded.eod_id not in ids[:-1]
            found.append(loaded.decode(ids[:-1]))
    return found


@pytest.mark.parametrize(
    ("flags", "left_out"),
    [
        ([], []),
        (["--min-score", "3"], ["Low.", "Unscored."]),
        (["--languages", "en,fr"], ["Ein Satz über Öfen."]),
        (["--min-language-score", "0.9"], ["Ein Satz über Öfen.", "Unscored."]),
        (["--min-length", "5", "--max-length", "30"], ["Low.", LITERAL_EOD]),
        (["--max-tokens", "25"], [LITERAL_EOD]),
    ],
)
def test_fineweb(tmp_path: Path, tokenizer: Path, flags: list[str], left_out: list[str]) -> None:
    path = write_fineweb(tmp_path / "train.parquet")
    assert prepare("fineweb", path, tmp_path / "fw", tokenizer, *flags) == 0
    whole = ["The first document.", LITERAL_EOD, "Ein Satz über Öfen.", "Low.", "Unscored.", "Another dump."]
    assert texts(tmp_path / "fw", tokenizer) == [text for text in whole if text not in left_out]
    manifest = read_manifest(tmp_path / "fw" / "fw-00000-of-00001")
    assert sum(manifest.skipped.values()) == 3 + len(left_out)
    assert manifest.damaged == 1


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        (["--languages", "Python,c"], ["print(1)\n", "int main() { return 0; }\n"]),
        (["--license-types", "no_license"], ["-- query\n"]),
        (["--licenses", "MIT,Apache-2.0"], ["print(1)\n", "int main() { return 0; }\n"]),
    ],
)
def test_stackv2_from_blobs(tmp_path: Path, tokenizer: Path, flags: list[str], kept: list[str]) -> None:
    blobs = write_blobs(tmp_path / "swh", stack_blobs())
    path = write_parquet(tmp_path / "ids.parquet", stack_rows("files ids"))
    assert prepare("stackv2", path, tmp_path / "code", tokenizer, "--blobs", str(blobs), *flags) == 0
    assert texts(tmp_path / "code", tokenizer) == kept


def test_text_under_another_name(tmp_path: Path, tokenizer: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl.zst", [{"body": "A book."}, "no json"])
    assert prepare("text", path, tmp_path / "books", tokenizer, "--text-column", "body") == 0
    assert texts(tmp_path / "books", tokenizer) == ["A book."]


def test_longalpaca(tmp_path: Path, tokenizer: Path) -> None:
    path = write_array(tmp_path / "x.json", alpaca_rows())
    assert prepare("longalpaca", path, tmp_path / "la", tokenizer, "--max-example-tokens", "500") == 0
    found = texts(tmp_path / "la", tokenizer)
    assert found[0] == prompt("Name a colour.") + "Blue."
    assert found[1] == prompt("Sum up.", "A long text.") + "Short."
    assert found[2].endswith("### Response:Of the paper.")
    manifest = read_manifest(tmp_path / "la" / "la-00000-of-00001")
    assert (manifest.longest, manifest.spec.loss_mask) == (500, True)


def test_a_task_does_its_own_part(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(5):
        write_lines(tmp_path / "in" / f"{number}.jsonl", [{"text": f"Document {number}."}])
    for task in (1, 0):
        assert prepare("text", tmp_path / "in", tmp_path / "out", tokenizer, "--shard", f"{task}/2") == 0
        made = sorted(int(path.name[4:9]) for path in (tmp_path / "out").glob("*.manifest.json"))
        assert made == ([1, 3] if task == 1 else [0, 1, 2, 3, 4])
    assert texts(tmp_path / "out", tokenizer) == [f"Document {number}." for number in range(5)]
    assert "3 of 5 shards" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "flags", "message"),
    [
        ("fineweb", ["--min-language-score", "95"], "--min-language-score must be from 0 to 1, not 95"),
        ("fineweb", ["--languages", "English"], "--languages takes codes of two or three letters such as en or deu"),
        ("stackv2", ["--license-types", "MIT"], "--license-types takes permissive and no_license, not 'MIT'"),
        ("text", ["--min-length", "0"], "--min-length must be at least 1, not 0"),
        ("text", ["--text-column", "body"], "has no column body; its columns are text"),
        ("stackv2", ["--blobs", "absent"], "--blobs absent: there is no such folder"),
        ("longalpaca", [], "has no column instruction; its columns are text"),
        ("text", ["--strict"], "x.jsonl: not JSON, after 1 good rows; --strict allows no such row"),
    ],
)
def test_wrong_input_is_one_message(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str], kind: str, flags: list[str], message: str
) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"text": "x"}, "no json"])
    assert prepare(kind, path, tmp_path / "out", tokenizer, *flags) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert not list((tmp_path / "out").glob("*.manifest.json"))


def test_ids_alone_are_one_message(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_parquet(tmp_path / "ids.parquet", stack_rows("files ids"))
    assert prepare("stackv2", path, tmp_path / "out", tokenizer) == 2
    assert "ids.parquet holds ids only (blob_id, no content)" in capsys.readouterr().err


def test_a_file_that_is_none_does_not_stop_the_others(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_bytes(tmp_path / "in" / "a.parquet", b"half a download")
    write_fineweb(tmp_path / "in" / "b.parquet")
    assert prepare("fineweb", tmp_path / "in", tmp_path / "out", tokenizer) == 2
    assert "a.parquet is not a whole parquet file" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").glob("*.manifest.json")] == ["out-00001-of-00002.manifest.json"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--shard", "2/2"], "--shard: must be I/N with 0 <= I < N, tasks counted from 0, not 2/2"),
        (["--shard", "one"], "--shard: must be I/N"),
        (["--processes", "0"], "--processes: must be an integer from 1, not 0"),
        (["--backend", "fast"], "invalid choice: 'fast' (choose from"),
        (["--languages", "en,"], "--languages: must be names separated by commas, not 'en,'"),
        (["--min-score", "high"], "--min-score: invalid float value: 'high'"),
        (["--min-scores", "3"], "unrecognized arguments: --min-scores"),
    ],
)
def test_flags_that_cannot_be(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        prepare("fineweb", tmp_path, tmp_path / "out", tokenizer, *flags)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("kind", OPTIONS)
def test_every_option_has_a_flag_that_help_explains(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["prep", kind, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(OPTIONS[kind]):
        assert f"--{field.name.replace('_', '-')}" in text
