"""Checkpoints saved under one layout and loaded under another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import training_runs
from helpers.stages import tiny_stage
from helpers.training_runs import Resumed
from helpers.workers import Workers

from megatron_palimpsa import parallel
from megatron_palimpsa.config import StageConfig

ONE: dict[str, Any] = {"distributed_optimizer": False}
ONE_DISTRIBUTED: dict[str, Any] = {}
TP2: dict[str, Any] = {"tp": 2, "sequence_parallel": True, "distributed_optimizer": False}
TP2_DISTRIBUTED: dict[str, Any] = {"tp": 2}
PP2: dict[str, Any] = {"pp": 2}
DP2: dict[str, Any] = {}


def stage(layout: dict[str, Any], world_size: int, precision: str = "fp32") -> StageConfig:
    return tiny_stage(
        world_size,
        # Five layers: two pipeline stages hold three and two of them.
        model={"pattern": "MP*|-P", "init_std": 0.2},
        train={"global_batch_tokens": 128, "tokens": 25600, "precision": precision},
        optimizer={"lr": 1e-3},
        parallel=layout,
    )


def alone(function: Callable[..., Resumed], *arguments: Any) -> list[Resumed]:
    try:
        return [function(*arguments)]
    finally:
        parallel.destroy()


def run_on(workers: Workers, world_size: int, function: Callable[..., Resumed], *arguments: Any) -> list[Resumed]:
    return alone(function, *arguments) if world_size == 1 else workers.run(function, *arguments)


CROSSINGS = {
    "one-to-tp2": (ONE, 1, TP2, 2),
    "one-to-pp2": (ONE_DISTRIBUTED, 1, PP2, 2),
    "one-to-dp2": (ONE, 1, DP2, 2),
    "tp2-to-one": (TP2, 2, ONE_DISTRIBUTED, 1),
    "pp2-to-tp2": (PP2, 2, TP2_DISTRIBUTED, 2),
    "dp2-to-one": (DP2, 2, ONE, 1),
    "dp2-to-pp2": (DP2, 2, PP2, 2),
}


@pytest.mark.parametrize("crossing", CROSSINGS)
def test_weights_and_moments_cross_layouts_exactly(crossing: str, two_processes: Workers, tmp_path: Path) -> None:
    from_layout, from_size, to_layout, to_size = CROSSINGS[crossing]
    saver, loader = stage(from_layout, from_size), stage(to_layout, to_size)
    saved = run_on(two_processes, from_size, training_runs.train_and_save, saver, 2, 3, tmp_path)
    loaded = run_on(two_processes, to_size, training_runs.load_and_train, loader, 2, 3, tmp_path, True)

    for step, reference in zip(loaded[0].steps, saved[0].steps, strict=True):
        assert step.loss == pytest.approx(reference.loss, rel=1e-5)
        assert step.grad_norm == pytest.approx(reference.grad_norm, rel=1e-5)
    assert loaded[0].learning_rates == saved[0].learning_rates
    # What the loader starts from, read from disk as whole tensors, is what it was given: save, load, save.
    first, second = (training_runs.whole_tensors(tmp_path / name) for name in ("step-2", "loaded-2"))
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize(("layout", "precision"), [(TP2, "fp32"), (DP2, "bf16"), (PP2, "bf16")], ids=str)
def test_same_layout_goes_on_bit_for_bit(
    layout: dict[str, Any], precision: str, two_processes: Workers, tmp_path: Path
) -> None:
    config = stage(layout, 2, precision)
    saved = two_processes.run(training_runs.train_and_save, config, 2, 2, tmp_path)
    loaded = two_processes.run(training_runs.load_and_train, config, 2, 2, tmp_path, False)
    for rank in range(2):
        assert loaded[rank].steps == saved[rank].steps
        for name, value in saved[rank].state.items():
            assert torch.equal(value, loaded[rank].state[name]), name


def test_save_that_one_rank_cannot_write_fails_on_both(two_processes: Workers, tmp_path: Path) -> None:
    messages = two_processes.run(training_runs.save_with_a_full_disk_on_one_rank, stage(TP2, 2), tmp_path)
    assert messages[0] == messages[1]
    assert "no space left on the disk" in messages[0]
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == ["latest", "step-1"]
