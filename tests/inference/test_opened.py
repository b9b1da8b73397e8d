"""Models as they were saved, on one process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from helpers.runs import read_checkpoint

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.convert.trained import find_trained
from megatron_palimpsa.inference import opened
from megatron_palimpsa.training.saved import find_saved


@pytest.mark.parametrize("precision", [None, "fp32"])
def test_weights_are_those_saved_and_fp32_stays(trained_stage: Path, tmp_path: Path, precision) -> None:
    saved = read_checkpoint(trained_stage / "checkpoints" / "step-8", tmp_path)
    with opened(trained_stage, precision) as it:
        assert it.checkpoint == trained_stage / "checkpoints" / "step-8"
        assert not it.model.training
        for name, parameter in it.model.named_parameters():
            kept = precision == "fp32" or getattr(parameter, "keep_fp32", False)
            assert parameter.dtype == (torch.float32 if kept else torch.bfloat16), name
            assert torch.equal(parameter, saved[name].to(parameter.dtype)), name


def test_a_checkpoint_of_the_stage_can_be_named(trained_stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(trained_stage / "checkpoints" / "step-8") as it:
        assert it.checkpoint.name == "step-8"
    # By a path that has no parents.
    monkeypatch.chdir(trained_stage / "checkpoints")
    folder, checkpoint = find_saved(Path("step-8"))
    assert (folder.path, checkpoint) == (trained_stage, Path("step-8"))
    monkeypatch.chdir("step-8")
    assert find_saved(Path())[0].path == trained_stage
    assert find_trained(Path()).step == 8


def test_what_is_not_there_or_damaged_is_one_message(trained_stage: Path, tmp_path: Path) -> None:
    copy = tmp_path / "stage"
    shutil.copytree(trained_stage, copy)
    (copy / "checkpoints" / "step-8" / "__0_0.distcp").write_bytes(b"")
    for source, message in (
        (tmp_path, "holds no stage"),
        (copy / "checkpoints" / "step-8", "is damaged: __0_0.distcp has 0 bytes"),
        (copy / "checkpoints" / "step-9", "is missing"),
    ):
        with pytest.raises(ConfigError, match=message), opened(source):
            pass
