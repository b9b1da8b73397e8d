"""`convert verify`: the same function, or another one, or no comparison."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from helpers.published_mamba2 import random_mamba2
from helpers.saved_stages import train_and_save
from helpers.stages import tiny_stage

from megatron_palimpsa import cli
from megatron_palimpsa.export import verify


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of Hugging Face's format, untied, in bf16; `base` beside it is its stage."""
    folder = tmp_path_factory.mktemp("verify")
    random_mamba2(n_groups=2, vocab_size=61, tie_word_embeddings=False).bfloat16().save_pretrained(folder / "source")
    assert cli.main(["convert", "mamba2", str(folder / "source"), str(folder / "base")]) == 0
    return folder / "source"


def test_a_published_model_and_its_stage(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", "verify", str(source), str(source.parent / "base")]) == 0
    assert "PASS" in capsys.readouterr().out


def test_a_published_model_and_a_bf16_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random_mamba2(n_groups=2, vocab_size=61, tie_word_embeddings=False).save_pretrained(tmp_path / "source")
    assert cli.main(["convert", "mamba2", str(tmp_path / "source"), str(tmp_path / "base")]) == 0
    assert cli.main(["export", str(tmp_path / "base"), str(tmp_path / "exported")]) == 0
    base, exported = capsys.readouterr().out.splitlines()
    assert "parameters in bf16 (train.precision)" in base
    assert "parameters in bf16 (--dtype fp32 keeps" in exported
    assert cli.main(["convert", "verify", str(tmp_path / "source"), str(tmp_path / "exported")]) == 0
    assert cli.main(["export", str(tmp_path / "base"), str(tmp_path / "whole"), "--dtype", "fp32"]) == 0
    assert "parameters in fp32, README.md" in capsys.readouterr().out


def test_one_weight_that_differs(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = random_mamba2(n_groups=2, vocab_size=61, tie_word_embeddings=False).bfloat16().float()
    with torch.no_grad():
        model.backbone.layers[1].mixer.A_log[3] += 1e-2
    model.save_pretrained(tmp_path)
    assert cli.main(["convert", "verify", str(tmp_path), str(source.parent / "base")]) == 1
    assert capsys.readouterr().out.endswith("FAIL: another function\n")

    # As `convert palimpsa` leaves it.
    start = tmp_path / "start"
    shutil.copytree(source.parent / "base", start)
    (start / "conversion.json").write_text("{}")
    for target in (start, start / "checkpoints" / "step-0"):
        assert cli.main(["convert", "verify", str(tmp_path), str(target), "--tokens", "64"]) == 1
        assert f"FAIL: another function; {start}/conversion.json says" in capsys.readouterr().out


def test_what_cannot_be_compared(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = {"train_blend": "", "valid_blend": "", "tokenizer": ""}
    other = train_and_save(tiny_stage(output_dir=str(tmp_path), model={"vocab_size": 80}, data=data), steps=1)
    (tmp_path / "text").write_text("abc")
    base = source.parent / "base"
    for arguments, message in (
        ([str(source), str(other)], "a vocabulary of 61 ids"),
        ([str(source), str(tmp_path / "no")], "no: no such folder"),
        ([str(source), str(base), "--tokens", "0"], "--tokens 0: at least one"),
        ([str(source), str(base), "--text", str(tmp_path / "text")], "neither of the models has a tokenizer"),
    ):
        assert cli.main(["convert", "verify", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_not_a_number_is_no_pass() -> None:
    assert not verify.Comparison(1, float("nan"), 1.0, 0).passed
