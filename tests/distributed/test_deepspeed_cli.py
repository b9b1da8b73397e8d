"""Stages trained by the command line under DeepSpeed: without a launcher, killed, and as the Megatron engine trains."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs import Events, read_checkpoint, train_in_new_process, train_on_ranks, write_stage

pytest.importorskip("deepspeed")


def losses(folder: Path) -> list[float]:
    """Of every step, the latest record of it."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return list({record["step"]: record["loss"] for record in records if "grad_norm" in record}.values())


def write(folder: Path, data: Path, name: str, zero: int | None = None, **changes: Any) -> Path:
    parallel: dict[str, Any] = {} if zero is None else {"engine": "deepspeed", "deepspeed": {"zero_stage": zero}}
    return write_stage(folder, data, name=name, parallel=parallel, **changes)


def test_without_a_launcher_it_is_an_override(tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    megatron, deepspeed = (write(tmp_path, tiny_data, name) for name in ("megatron", "deepspeed"))
    assert train_in_new_process(megatron) == 0
    assert train_in_new_process(deepspeed, "parallel.engine=deepspeed", "parallel.deepspeed.zero_stage=3") == 0
    expected = losses(tmp_path / "runs" / "megatron")
    assert len(expected) == 8
    assert losses(tmp_path / "runs" / "deepspeed") == pytest.approx(expected, rel=1e-5)


def test_twenty_steps_have_the_same_losses_under_both_engines(tiny_data: Path, tmp_path: Path) -> None:
    twenty = {"tokens": 20 * 64}
    assert train_on_ranks(write(tmp_path, tiny_data, "megatron", train=twenty), ranks=[Events(), Events()]) == [0, 0]
    assert train_on_ranks(write(tmp_path, tiny_data, "zero3", 3, train=twenty), ranks=[Events(), Events()]) == [0, 0]
    expected = losses(tmp_path / "runs" / "megatron")
    assert len(expected) == 20
    assert losses(tmp_path / "runs" / "zero3") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long), 3])
def test_killed_and_started_again_it_ends_in_the_same_bits(zero: int, tiny_data: Path, tmp_path: Path) -> None:
    unbroken, killed = (write(tmp_path, tiny_data, name, zero) for name in ("unbroken", "killed"))
    assert train_on_ranks(unbroken, ranks=[Events(), Events()]) == [0, 0]
    # In the middle of step 6, with the checkpoint of step 4 there.
    died = train_on_ranks(killed, ranks=[Events(signals={6: signal.SIGKILL}), Events(signals={6: signal.SIGKILL})])
    assert died == [-signal.SIGKILL, -signal.SIGKILL]
    assert train_on_ranks(killed, ranks=[Events(), Events()]) == [0, 0]
    runs = tmp_path / "runs"
    assert losses(runs / "killed") == losses(runs / "unbroken")
    first, second = (read_last_checkpoint(runs / name, tmp_path) for name in ("unbroken", "killed"))
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def read_last_checkpoint(run: Path, scratch: Path) -> dict[str, torch.Tensor]:
    checkpoints = run / "checkpoints"
    return read_checkpoint(checkpoints / (checkpoints / "latest").read_text().strip(), scratch)


def test_the_engines_take_turns_within_a_stage(tiny_data: Path, tmp_path: Path) -> None:
    """Megatron, DeepSpeed and Megatron again train four steps each, from each other's checkpoints."""
    twelve = {"tokens": 12 * 64}
    unbroken, turns = (write(tmp_path, tiny_data, name, train=twelve) for name in ("unbroken", "turns"))
    assert train_in_new_process(unbroken) == 0
    parts = {4: "megatron", 8: "deepspeed", 12: "megatron"}
    for step, engine in parts.items():
        stop = [] if step == 12 else [f"train.stop_at_step={step}"]
        code = train_in_new_process(turns, f"parallel.engine={engine}", *stop)
        assert code == (0 if step == 12 else os.EX_TEMPFAIL)
    runs = tmp_path / "runs"
    assert losses(runs / "turns") == pytest.approx(losses(runs / "unbroken"), rel=1e-5)
