"""`prep needles|merge|status|verify|blend|index|dump`: from shards to what training reads, one message if not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from helpers.bpe import write_tokenizer
from helpers.corruptions import CORRUPTIONS, Corruption, write_sealed_set
from helpers.data_fixtures import write_array, write_lines
from helpers.datasets import fake_tokenizer
from helpers.stages import tiny_stage
from palimpsa_data import tokenizers
from palimpsa_data.locks import lock
from palimpsa_data.needles.names import split_of
from palimpsa_data.sets import SetReader, find_problems, read_set
from palimpsa_data.shards import read_manifest

from megatron_palimpsa import cli
from megatron_palimpsa.config import save_resolved
from megatron_palimpsa.training.blend_file import read_blend
from megatron_palimpsa.training.data import StageData

TEXTS = [f"Document {number} of {'many ' * (number % 7)}words." for number in range(60)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, three files of rows, the set `whole` of them and `pairs` of instruction examples."""
    folder = tmp_path_factory.mktemp("made")
    write_tokenizer(folder)
    for shard in range(3):
        rows = [{"text": text} for text in TEXTS[shard * 20 : shard * 20 + 20]]
        write_lines(folder / "in" / f"part-{shard}.jsonl", [*rows, *([] if shard else [{"text": None}])])
    assert prep(folder, "text", folder / "in", "--output", folder / "whole") == 0
    pairs = [{"instruction": f"Name {n}.", "output": f"It is {n}.", "input": "x " * 40 * n} for n in range(8)]
    write_array(folder / "pairs.json", pairs)
    assert (
        prep(folder, "longalpaca", folder / "pairs.json", "--output", folder / "pairs", "--max-example-tokens", "300")
        == 0
    )
    return folder


@pytest.fixture
def work(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "work")


def prep(folder: Path, *arguments: object) -> int:
    """A command that encodes, with the folder's tokenizer."""
    encoding = ["--tokenizer", str(folder / "tokenizer.json"), "--backend", "huggingface"]
    return cli.main(["prep", *map(str, arguments), *encoding])


def call(*arguments: object) -> int:
    return cli.main(["prep", *map(str, arguments)])


def texts(folder: Path, tokenizer: Path) -> list[str]:
    reader, loaded = SetReader(folder, checksums=True), tokenizers.load(tokenizer, backend="huggingface")
    return [loaded.decode(reader.read(i, 0, int(length) - 1)[0]) for i, length in enumerate(reader.lengths)]


# Merge, report, status


def test_a_finished_job_is_a_set_with_a_report(made: Path) -> None:
    info = read_set(made / "whole")
    assert texts(made / "whole", made / "tokenizer.json") == TEXTS
    lengths = sorted(SetReader(made / "whole", checksums=False).lengths.tolist())
    report = json.loads((made / "whole" / "report.json").read_text())
    assert (report["documents"], report["shards"], report["tokens"]) == (60, 3, sum(lengths))
    assert (report["shortest"], report["median"], report["longest"]) == (
        lengths[0],
        sum(lengths[29:31]) / 2,
        lengths[-1],
    )
    assert sum(report["skipped"].values()) == report["damaged"] == 1
    assert sum(tokens for _, tokens in report["sources"].values()) == info.tokens
    assert [documents for documents, _ in report["sources"].values()] == [20, 20, 20]
    assert sum(report["lengths"].values()) == 60
    assert report["input_bytes"] == sum(path.stat().st_size for path in (made / "in").iterdir())
    assert report["text_bytes"] == sum(map(len, TEXTS))
    assert (made / "whole" / "lengths.png").read_bytes().startswith(b"\x89PNG")
    text = (made / "whole" / "report.txt").read_text()
    assert f"whole: 60 documents, {info.tokens:,} tokens, in 3 shards" in text
    assert "left out: 1 row, 1 of them damaged" in text
    assert "part-1 (20 documents)" in text


def test_the_report_says_what_is_trained_on(made: Path) -> None:
    info = read_set(made / "pairs")
    assert 0 < info.trained_tokens < info.tokens
    assert f"{info.trained_tokens:,} of them trained on" in (made / "pairs" / "report.txt").read_text()


def test_tasks_one_after_the_other(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status says what is missing, merge refuses until all is there, the last task merges; the set is the same."""
    job = ["text", work / "in", "--output", work / "tasks"]
    assert prep(work, *job, "--shard", "1/3") == 0
    assert "1 of 3 shards complete" in capsys.readouterr().out
    assert not (work / "tasks" / "set.json").exists()
    assert call("status", work / "tasks") == 75
    status = capsys.readouterr().out
    assert "0 in work, 0 damaged, 2 not begun" in status
    assert "missing  tasks-00000-of-00003  in/part-0.jsonl" in status
    assert "run the same prep command again" in status
    assert call("merge", work / "tasks") == 2
    assert "cannot merge yet" in (error := capsys.readouterr().err)
    assert "tasks-00002-of-00003" in error
    for task in ("0/3", "2/3"):
        assert prep(work, *job, "--shard", task) == 0
    assert call("status", work / "tasks") == 0
    assert "merged: set.json is there" in capsys.readouterr().out
    assert texts(work / "tasks", work / "tokenizer.json") == TEXTS


def test_merge_again_changes_nothing(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (work / "whole" / "set.json").read_bytes()
    (work / "whole" / "set.json").unlink()
    assert call("status", work / "whole") == 0
    assert f"next: prep merge {work / 'whole'}" in capsys.readouterr().out
    assert call("merge", work / "whole", work / "pairs") == 0
    assert (work / "whole" / "set.json").read_bytes() == before
    assert "whole: 60 documents" in capsys.readouterr().out


def test_status_says_who_works_on_what(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stem = work / "whole" / "whole-00001-of-00003"
    with lock(stem.with_name(stem.name + ".lock"), wait=False):
        assert call("status", work / "whole") == 75
    out = capsys.readouterr().out
    assert "2 of 3 shards complete" in out
    assert "working  whole-00001-of-00003  in/part-1.jsonl" in out


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".manifest.json"])
def test_damage_is_no_complete_shard(suffix: str, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = work / "whole" / f"whole-00001-of-00003{suffix}"
    path.write_bytes(path.read_bytes()[:-3])
    assert call("status", work / "whole") == 75
    assert "bad      whole-00001-of-00003" in capsys.readouterr().out
    assert call("merge", work / "whole") == 2


def test_a_shard_of_another_job_is_none_of_this(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prep(work, "text", work / "in", "--output", work / "other" / "whole", "--min-length", "2") == 0
    for path in (work / "other" / "whole").glob("whole-00001-*"):
        shutil.copy(path, work / "whole" / path.name)
    assert call("status", work / "whole") == 75
    assert "made by another job" in capsys.readouterr().out


def test_a_folder_without_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("status", "merge"):
        assert call(command, tmp_path) == 2
        assert "no job was started" in capsys.readouterr().err


# Verify


def test_verify_says_that_all_is_well(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("verify", made / "whole", made / "pairs", "--tokenizer", made / "tokenizer.json") == 0
    assert "whole: intact, 3 shards, 60 documents" in capsys.readouterr().out


@pytest.mark.parametrize("corruption", CORRUPTIONS, ids=lambda corruption: corruption.name)
def test_verify_names_each_bad_shard(
    corruption: Corruption, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sealed_set(tmp_path / "s", fake_tokenizer(tmp_path / "tokenizer.model", 61))
    corruption.apply(tmp_path / "s")
    assert call("verify", tmp_path / "s") == 2
    assert corruption.named in capsys.readouterr().out


def test_verify_knows_a_foreign_tokenizer(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_tokenizer(work / "other", vocab_size=310)
    assert call("verify", work / "whole", "--tokenizer", other) == 2
    assert "whole/set.json: made with another tokenizer" in capsys.readouterr().out


# Needles


NEEDLES = ("--documents", "6", "--shortest", "600", "--longest", "900", "--shards", "2")


def test_needles_are_a_set_like_others(work: Path) -> None:
    assert prep(work, "needles", "--output", work / "n", *NEEDLES) == 0
    reader = SetReader(work / "n", checksums=True)
    assert len(reader.lengths) == 6
    assert 500 < min(reader.lengths) <= max(reader.lengths) <= 900
    assert find_problems(work / "n") == []
    assert 6 < reader.info.trained_tokens < reader.info.tokens / 4
    tokens, mask = reader.read(0, 0, 900)
    assert mask is not None
    answer = tokenizers.load(work / "tokenizer.json").decode(tokens[mask == 1])
    assert "Answer:" not in answer
    assert sum(read_manifest(work / "n" / f"n-0000{i}-of-00002").documents for i in range(2)) == 6


def test_needles_come_out_the_same_in_tasks(work: Path) -> None:
    assert prep(work, "needles", "--output", work / "a" / "n", *NEEDLES) == 0
    for task in ("1/2", "0/2"):
        assert prep(work, "needles", "--output", work / "b" / "n", *NEEDLES, "--shard", task) == 0
    for path in (work / "a" / "n").glob("n-*"):
        assert path.read_bytes() == (work / "b" / "n" / path.name).read_bytes()


def test_needles_of_another_seed_and_loss_on_all(work: Path) -> None:
    for name, flags in (("one", ["--seed", "1"]), ("two", ["--seed", "2"]), ("all", ["--seed", "1", "--loss", "all"])):
        assert prep(work, "needles", "--output", work / name, *NEEDLES, "--tasks", "single", *flags) == 0
    shown = {name: texts(work / name, work / "tokenizer.json") for name in ("one", "two", "all")}
    assert not set(shown["one"]) & set(shown["two"])
    info = read_set(work / "all")
    assert (info.loss_mask, info.trained_tokens) == (False, info.tokens)
    keys = {text.rpartition("belongs to ")[2].partition("?")[0] for text in shown["all"]}
    assert {split_of(key) for key in keys} == {"train"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tasks", "haystack"], "unknown task 'haystack'"),
        (["--shortest", "9"], "--shortest 9"),
        (["--loss", "x"], "--loss"),
    ],
)
def test_impossible_needles(work: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert prep(work, "needles", "--output", work / "n", *flags) == 2
    assert message in capsys.readouterr().err


# Blend


def test_a_blend_is_what_training_reads(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blend = work / "blends" / "b.yaml"
    assert call("blend", blend, "--set", work / "whole", "0.75", "--set", work / "pairs", "0.25", "3") == 0
    whole, pairs = read_blend(blend, "here")
    assert (whole.folder.resolve(), pairs.folder.resolve()) == (work / "whole", work / "pairs")
    assert (whole.weight, whole.epochs, pairs.weight, pairs.epochs) == (0.75, None, 0.25, 3.0)
    assert yaml.safe_load(blend.read_text())[0]["set"] == "../whole"
    assert "75.00%  whole: 60 documents" in capsys.readouterr().out


def test_a_blend_without_weights_takes_every_set_as_large_as_it_is(work: Path) -> None:
    assert call("blend", work / "b.yaml", "--set", work / "whole", "--set", work / "pairs") == 0
    weights = [entry.weight for entry in read_blend(work / "b.yaml", "here")]
    assert weights == [read_set(work / name).tokens for name in ("whole", "pairs")]


def test_small_weights_stay_numbers(work: Path) -> None:
    assert call("blend", work / "b.yaml", "--set", work / "whole", "1e-7") == 0
    assert [entry.weight for entry in read_blend(work / "b.yaml", "here")] == [1e-7]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["--set", "whole", "much"], "--set whole much"),
        (["--set", "whole", "0"], "weight 0.0 must be a number above 0"),
        (["--set", "whole", "inf"], "weight inf"),
        (["--set", "whole", "1", "-1"], "epochs -1.0"),
        (["--set", "whole", "1", "1", "1"], "at the most"),
        (["--set", "whole", "1", "--set", "whole", "2"], "whole is named twice"),
        (["--set", "in", "1"], "set.json is missing"),
        (["--set", "whole", "1", "--set", "foreign", "1"], "different tokenizers"),
        (["--set", "whole", "0.7", "--set", "pairs"], "give every set a weight, or none of them"),
    ],
)
def test_wrong_blends(
    work: Path, sets: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(work)
    write_sealed_set(work / "foreign", fake_tokenizer(work / "foreign.model", 61))
    assert call("blend", "b.yaml", *sets) == 2
    assert message in capsys.readouterr().err
    assert not (work / "b.yaml").exists()


# Index and dump


@pytest.fixture
def config(work: Path) -> Path:
    """A stage of `whole` and `pairs`."""
    assert call("blend", work / "b.yaml", "--set", work / "whole", "1", "--set", work / "pairs", "1") == 0
    blend = str(work / "b.yaml")
    stage = tiny_stage(
        model={"seq_length": 128, "vocab_size": 304},
        data={
            "train_blend": blend,
            "valid_blend": blend,
            "tokenizer": str(work / "tokenizer.json"),
            "packing": "best-fit",
        },
        train={"global_batch_tokens": 256, "tokens": 2560},
    )
    save_resolved(stage, work / "stage.yaml")
    return work / "stage.yaml"


def test_index_is_written_once(config: Path, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("index", config) == 0
    assert f"{work / 'whole' / 'index'}: " in capsys.readouterr().out
    before = {path: path.stat().st_mtime_ns for path in (work / "whole" / "index").iterdir()}
    assert call("index", config, "data.packing=best-fit") == 0
    assert before == {path: path.stat().st_mtime_ns for path in (work / "whole" / "index").iterdir()}


def test_verify_reads_the_index_too(config: Path, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("index", config) == 0
    assert call("verify", work / "whole") == 0
    path = next((work / "whole" / "index").glob("*.segments.npy"))
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    assert call("verify", work / "whole") == 2
    assert f"{path}: content differs" in capsys.readouterr().out


def test_index_checks_the_data(config: Path, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = work / "pairs" / "pairs-00000-of-00001.bin"
    path.write_bytes(path.read_bytes()[:-2])
    assert call("index", config) == 2
    assert "pairs-00000-of-00001.bin" in capsys.readouterr().err


def test_dump_marks_what_is_not_trained_on(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("dump", made / "pairs", "0", "--tokenizer", made / "tokenizer.json") == 0
    out = capsys.readouterr().out
    assert "document 0 of pairs: " in out
    assert "### Instruction:\nName 0.\n\n### Response:]]It is 0.<eod>" in out
    assert "\n\n[[Below is an instruction" in out
    assert call("dump", made / "whole", "7", "--tokenizer", made / "tokenizer.json") == 0
    assert f"\n\n{TEXTS[7]}<eod>\n" in capsys.readouterr().out


def test_dump_shows_a_sequence_as_training_gets_it(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from megatron_palimpsa.config import load_stage

    data = StageData(load_stage(config, []))
    shown = []
    for number in range(20):
        assert call("dump", config, number) == 0
        shown.append(capsys.readouterr().out)
        reader, segments = data.train_sequence(number)
        assert f"sequence {number} of stage tiny: {sum(part.length for part in segments)} of 128 tokens" in shown[-1]
        assert shown[-1].count("--- document") == len(segments)
        assert f"set {reader.info.name}" in shown[-1]
    assert any("### Response:]]It is" in text for text in shown)
    assert any("<eod>" in text and "[[" not in text.partition("\n")[2] for text in shown)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda work: [work / "whole", 60, "--tokenizer", work / "tokenizer.json"], "documents 0 to 59, no 60"),
        (lambda work: [work / "whole", 0], "--tokenizer"),
        (lambda work: [work / "whole", 0, "seed=1", "--tokenizer", work / "tokenizer.json"], "no KEY=VALUE"),
        (lambda work: [work / "stage.yaml", 0, "--tokenizer", work / "tokenizer.json"], "data.tokenizer"),
        (lambda work: [work / "whole", 0, "--tokenizer", write_tokenizer(work / "o", 310)], "another tokenizer"),
        (lambda work: [work / "nowhere", 0], "nowhere"),
    ],
)
def test_wrong_dumps(
    work: Path, arguments: Callable[[Path], list[object]], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("dump", *arguments(work)) == 2
    assert message in capsys.readouterr().err
