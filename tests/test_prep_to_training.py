"""Published shapes of data through the commands into stage 1: prep, verify, blend, index, train, more ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from helpers.data_fixtures import fineweb_row, stack_file, write_fineweb, write_parquet
from helpers.runs import run, write_stage
from palimpsa_data.demo_sources import Sources
from palimpsa_data.sets import read_set

from megatron_palimpsa.training.metrics import read_records

SEQ = 128
STEPS = 24


def texts(sources: Sources, kind: str, count: int) -> list[str]:
    found = (text.content for text in sources.documents(kind))
    return list(itertools.islice((text for text in found if isinstance(text, str)), count))


def write_samples(folder: Path) -> None:
    """FineWeb-Edu's rows in two files, The Stack v2's repositories with nested files in two; a tokenizer."""
    sources = Sources()
    prose, code = texts(sources, "prose", 240), texts(sources, "code", 240)
    for number in range(2):
        rows = [fineweb_row(text, score=0.5 + index % 5) for index, text in enumerate(prose[number::2])]
        write_fineweb(folder / "fineweb" / f"train-{number:05d}.parquet", [*rows, fineweb_row(None), fineweb_row("")])
        files = [{**stack_file(text), "content": text} for text in code[number::2]]
        repositories: list[dict[str, Any]] = [
            {"repo_name": f"group/{first}", "files": files[first : first + 10]} for first in range(0, len(files), 10)
        ]
        write_parquet(folder / "stack" / f"train-{number:05d}.parquet", repositories)
    tokenizer = ["--output", folder / "tokenizer.json", "--vocab-size", "600"]
    succeed("prep", "tokenizer", folder / "fineweb", *tokenizer)


def succeed(*arguments: str | Path, ranks: int = 1) -> str:
    done = run(*arguments, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(folder: Path) -> dict[int, float]:
    return {
        record["step"]: record["loss"] for record in read_records(folder / "metrics.jsonl") if record["kind"] == "train"
    }


@pytest.mark.long
@pytest.mark.timeout(900)
def test_fineweb_and_the_stack_go_through_stage_1(tmp_path: Path) -> None:
    write_samples(tmp_path)
    encoding = ["--tokenizer", tmp_path / "tokenizer.json"]
    sets = tmp_path / "sets"
    web = succeed(
        "prep",
        "fineweb",
        tmp_path / "fineweb",
        "--output",
        sets / "web",
        "--min-score",
        "1",
        "--processes",
        "2",
        *encoding,
    )
    assert "2 shards" in web
    assert "score below 1.0" in web
    for task in ("0/2", "1/2"):
        code = succeed("prep", "stackv2", tmp_path / "stack", "--output", sets / "code", "--shard", task, *encoding)
    assert "Python (240 documents)" in code
    assert read_set(sets / "web").documents == 240 - 48
    assert read_set(sets / "code").documents == 240
    succeed("prep", "verify", sets / "web", sets / "code", *encoding)
    for name in ("train", "valid"):
        succeed("prep", "blend", tmp_path / f"{name}.yaml", "--set", sets / "web", "0.4", "--set", sets / "code", "0.6")

    changes = {
        "model": {"seq_length": SEQ, "vocab_size": 600},
        "train": {"tokens": STEPS * 4 * SEQ, "global_batch_tokens": 4 * SEQ, "eval_interval": STEPS},
        "checkpoint": {"interval": 10},
    }
    tokenizer = f"data.tokenizer={tmp_path / 'tokenizer.json'}"
    stages = {name: write_stage(tmp_path, tmp_path, name, **changes) for name in ("whole", "cut")}
    assert "web/index" in succeed("prep", "index", stages["whole"], tokenizer)
    succeed("train", stages["whole"], tokenizer)
    whole = losses(tmp_path / "runs" / "whole")
    assert len(whole) == STEPS
    assert sum(whole[step] for step in range(STEPS - 4, STEPS)) / 4 < whole[1] - 0.2

    # Stopped, and gone on with by two ranks at the same sequence.
    assert run("train", stages["cut"], tokenizer, "train.stop_at_step=11").returncode == 75
    succeed("train", stages["cut"], tokenizer, ranks=2)
    cut = losses(tmp_path / "runs" / "cut")
    assert cut.keys() == whole.keys()
    assert all(cut[step] == pytest.approx(whole[step], abs=2e-3) for step in whole)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_another_blend_or_a_bad_shard_under_a_checkpoint_is_refused(tmp_path: Path) -> None:
    write_samples(tmp_path)
    encoding = ["--tokenizer", tmp_path / "tokenizer.json"]
    sets = tmp_path / "sets"
    succeed("prep", "fineweb", tmp_path / "fineweb", "--output", sets / "web", *encoding)
    succeed("prep", "stackv2", tmp_path / "stack", "--output", sets / "code", *encoding)

    def blend(share: str) -> None:
        for name in ("train", "valid"):
            succeed(
                "prep", "blend", tmp_path / f"{name}.yaml", "--set", sets / "web", share, "--set", sets / "code", "1"
            )

    blend("1")
    changes = {
        "model": {"seq_length": SEQ, "vocab_size": 600},
        "train": {"tokens": 8 * SEQ * 4, "global_batch_tokens": 4 * SEQ},
    }
    stage = [write_stage(tmp_path, tmp_path, **changes), f"data.tokenizer={tmp_path / 'tokenizer.json'}"]
    assert run("train", *stage, "train.stop_at_step=4").returncode == 75
    blend("3")
    refused = run("train", *stage)
    assert refused.returncode == 2
    assert "was trained on other data (3 web + 1 code, there 1 web + 1 code)" in refused.stderr
    assert "restore the blend" in refused.stderr
    blend("1")
    shard = sets / "code" / "code-00001-of-00002.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-2] + whole[-4:-2])
    refused = run("train", *stage)
    assert refused.returncode == 2
    assert "code-00001-of-00002.bin: content differs" in refused.stderr
    shard.write_bytes(whole)
    succeed("train", *stage)
