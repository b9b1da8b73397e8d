"""Files of a sweep that are cut, changed, of another run or gone; and disks that are full."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.mqar import write_recipe
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_palimpsa import cli
from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.experiments.mqar import folders, report
from megatron_palimpsa.experiments.mqar.config import load_sweep
from megatron_palimpsa.experiments.mqar.files import write_whole
from megatron_palimpsa.experiments.mqar.records import Run, read_records, read_result, runs_of
from megatron_palimpsa.experiments.mqar.sweep import _Progress


def mqar(*arguments: object) -> int:
    return cli.main(["mqar", *map(str, arguments)])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe of two runs: seed 0 is finished, seed 1 has two of its five epochs."""
    folder = tmp_path_factory.mktemp("trained")
    recipe, epochs = write_recipe(folder), iter([True, True, False])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "build", lambda output_dir: None)
        assert mqar(recipe) == 0
        patch.setattr(_Progress, "may_begin", lambda *_: next(epochs))
        assert mqar(recipe, "sweep.seeds=[1]") == 75
    return folder


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> list[Run]:
    """Both runs, in a copy of the folder."""
    shutil.copytree(trained / "runs", tmp_path / "runs")
    return runs_of(load_sweep(write_recipe(tmp_path), ["sweep.seeds=[0,1]"]))


Tensors = dict[str, Tensor]
Metadata = dict[str, str]


def without(name: str) -> Callable[[Tensors, Metadata], Any]:
    return lambda tensors, metadata: (tensors.pop(name), metadata.pop("sha256"))


def replaced(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors, Metadata], Any]:
    return lambda tensors, metadata: (tensors.update({name: change(tensors[name])}), metadata.pop("sha256"))


def last_epoch(**values: Any) -> Callable[[Tensors, Metadata], Any]:
    """With other values in the last of the records."""

    def change(tensors: Tensors, metadata: Metadata) -> None:
        records = json.loads(metadata["records"])
        records[-1] |= values
        metadata["records"] = json.dumps(records)

    return change


NORM, EMBEDDING = "weights.decoder.final_norm.weight", "weights.embedding.word_embeddings.weight"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (replaced(NORM, lambda norm: norm[:1].clone()), f"it has no {NORM} in fp32 of shape [16]"),
        (replaced(NORM, lambda norm: norm.bfloat16()), f"it has no {NORM} in fp32"),
        (without(EMBEDDING), f"it has no {EMBEDDING}"),
        (without(NORM.replace("weights", "exp_avg")), "it has no exp_avg.decoder.final_norm.weight"),
        (lambda tensors, metadata: tensors[NORM][3:4].mul_(2), "its checksum is another"),
        (last_epoch(accuracy=0.5), "its checksum is another"),
        (lambda tensors, metadata: metadata.update(run="tiny lr 0.01 seed 0"), "it is of tiny lr 0.01 seed 0"),
        (last_epoch(lesson=7), "epoch 2 of its records is not one that follows in the curriculum"),
        (last_epoch(lesson=-1), "epoch 2 of its records is not"),
        (last_epoch(epoch=99), "epoch 2 of its records is not"),
        (last_epoch(length=16), "epoch 2 of its records has other sizes than its lesson"),
        (last_epoch(accuracy=float("nan")), "epoch 2 of its records has other sizes than its lesson, or no numbers"),
        (lambda tensors, metadata: metadata.update(records="[1]"), "not subscriptable"),
        (lambda tensors, metadata: metadata.update(records="[]"), "it has no epoch"),
    ],
)
def test_a_checkpoint_that_is_not_the_runs_own_is_refused(
    runs: list[Run], capsys: pytest.CaptureFixture[str], change: Callable[[Tensors, Metadata], Any], expected: str
) -> None:
    path = runs[1].checkpoint
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors, metadata)
    save_file(tensors, path, metadata)
    damaged = path.read_bytes()
    assert mqar(recipe_of(runs), "sweep.seeds=[1]") == 2
    message = capsys.readouterr().err
    assert str(path) in message
    assert expected in message
    assert message.endswith("; remove it to train the run again\n")
    assert path.read_bytes() == damaged


def recipe_of(runs: list[Run]) -> Path:
    return runs[0].config.folder.parents[1] / "tiny.yaml"


def test_damaged_files_are_named(runs: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    whole = runs[1].checkpoint.read_bytes()
    result = runs[0].result.read_bytes()
    records = json.loads(result)["records"]
    for path, content, expected in (
        (runs[1].checkpoint, b"", "unpack"),
        (runs[1].checkpoint, b"\x08\0\0\0\0\0\0\0{}      ", "it has no '__metadata__'"),
        (runs[1].checkpoint, whole[: len(whole) // 2], "incomplete metadata"),
        (runs[0].result, b"{", "Expecting property name"),
        (runs[0].result, result.replace(b'"lesson": 1', b'"lesson": 7'), "epoch 4 of its records is not one"),
        (runs[0].result, b"[" * 100_000, "recursion"),
        (runs[0].result, b"[]", "list indices"),
        (runs[0].result, result.replace(b'"seed": 0', b'"seed": 1'), "it is of tiny lr 0.01 seed 1"),
        (runs[0].result, json.dumps({**json.loads(result), "records": records[:4]}).encode(), "its 4 epochs are not"),
        (runs[0].result, json.dumps({**json.loads(result), "records": []}).encode(), "its 0 epochs are not"),
        (runs[0].result, json.dumps({**json.loads(result), "records": [1, 2]}).encode(), "not subscriptable"),
    ):
        before = path.read_bytes()
        path.write_bytes(content)
        assert mqar(recipe_of(runs), "sweep.seeds=[0,1]") == 2
        (message,) = capsys.readouterr().err.splitlines()
        assert str(path) in message
        assert expected in message
        assert "remove it to train the run again" in message
        path.write_bytes(before)


def test_a_checkpoint_from_before_there_were_checksums_is_read(
    runs: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    with safe_open(runs[1].checkpoint, framework="pt") as file:
        records = file.metadata()["records"]
    save_file(load_file(runs[1].checkpoint), runs[1].checkpoint, {"records": records})
    monkeypatch.setattr(report, "build", lambda output_dir: None)
    assert mqar(recipe_of(runs), "sweep.seeds=[1]") == 0
    assert read_records(runs[1])[:2] == json.loads(records)


def test_runs_without_settings_are_not_gone_on_with(runs: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    (runs[0].config.folder / "settings.yaml").unlink()
    assert mqar(recipe_of(runs), "train.weight_decay=0.5") == 2
    assert "holds runs, but no settings.yaml that says what of" in capsys.readouterr().err


def test_two_sweeps_that_start_at_once_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = write_recipe(tmp_path)
    mine, others = load_sweep(recipe), load_sweep(recipe, ["train.weight_decay=0.5"])
    lock = folders.lock

    @contextlib.contextmanager
    def later(folder: Path, *, wait: bool) -> Iterator[bool]:
        monkeypatch.setattr(folders, "lock", lock)
        folders.claim_folders([others])
        with lock(folder, wait=wait) as held:
            yield held

    monkeypatch.setattr(folders, "lock", later)
    with pytest.raises(ConfigError, match=r"train.weight_decay=0.1 \(there 0.5\)"):
        folders.claim_folders([mine])


def test_a_full_disk_leaves_what_was_there(
    runs: list[Run], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = runs[1].checkpoint.read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    assert mqar(recipe_of(runs), "sweep.seeds=[1]") == 1
    assert capsys.readouterr().err == (
        f"megatron-palimpsa: error: [Errno 28] No space left on device: '{runs[1].checkpoint}'\n"
    )
    assert runs[1].checkpoint.read_bytes() == before
    assert {path.name for path in runs[1].folder.iterdir()} == {".lock", "checkpoint.safetensors"}
    assert read_result(runs[1]) is None
    with pytest.raises(OSError, match=r"settings\.yaml"):
        write_whole(runs[1].config.folder / "settings.yaml", b"")


def test_a_checksum_is_of_shapes_too() -> None:
    from megatron_palimpsa.experiments.mqar.run import _sha256

    zeros = torch.zeros(2, 3)
    assert _sha256({"a": zeros}, "[]") != _sha256({"a": zeros.T.contiguous()}, "[]")
    assert _sha256({"a": torch.tensor(1.0)}, "[]") != _sha256({"a": torch.tensor(2.0)}, "[]")
