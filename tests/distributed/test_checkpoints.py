"""Checkpoints saved under one layout and loaded under others; writing and reading shared over ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import training_runs
from helpers.layout_table import Layout, Pipeline, stage
from helpers.training_runs import Resumed
from helpers.workers import Workers

from megatron_palimpsa import parallel
from megatron_palimpsa.config import StageConfig

LAYOUTS = {
    "one": Layout(distributed_optimizer=True),
    "tp2": Layout(tp=2),
    "tp2-sp": Layout(tp=2, sequence_parallel=True, distributed_optimizer=True),
    "pp2": Layout(pipeline=Pipeline(2, 1)),
    "pp2-vpp2": Layout(pipeline=Pipeline(2, 2), distributed_optimizer=True),
    "dp2": Layout(dp=2),
    "dp2-distopt": Layout(dp=2, distributed_optimizer=True),
    "cp2": Layout(cp=2),
    "cp2-distopt": Layout(cp=2, distributed_optimizer=True),
}
LARGE_LAYOUTS = {
    "tp2-pp2": Layout(tp=2, pipeline=Pipeline(2, 1), distributed_optimizer=True),
    "tp2-sp-dp2": Layout(tp=2, sequence_parallel=True, dp=2),
    "tp2-dp2-distopt": Layout(tp=2, dp=2, distributed_optimizer=True),
    "pp2-vpp2-dp2-distopt": Layout(pipeline=Pipeline(2, 2), dp=2, distributed_optimizer=True),
    "tp4": Layout(tp=4, sequence_parallel=True),
    "dp4-distopt": Layout(dp=4, distributed_optimizer=True),
    "cp2-dp2-distopt": Layout(cp=2, dp=2, distributed_optimizer=True),
    "tp2-sp-cp2": Layout(tp=2, sequence_parallel=True, cp=2, distributed_optimizer=True),
}
ALL = LAYOUTS | LARGE_LAYOUTS
QUICK = ("one", "dp2-distopt", "tp2-sp", "pp2-vpp2", "cp2-distopt")
"""Savers of `make test`: each kind of parallelism in its harder form."""


def run_on(workers: Workers, config: StageConfig, ranks: int, function: Callable[..., Any], *arguments: Any) -> Any:
    if ranks > 1:
        return workers.run_on(ranks, function, config, *arguments)
    try:
        return [function(config, *arguments)]
    finally:
        parallel.destroy()


def loaders(saver: str, table: dict[str, Layout]) -> list[str]:
    """One process and the two layouts after the saver's in the table."""
    others = [name for name in table if name != "one"]
    place = others.index(saver) if saver in others else -1
    following = [others[(place + step) % len(others)] for step in (1, 2)]
    return ["one", *following]


@pytest.mark.parametrize("saver", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in ALL])
def test_loaded_under_any_layout_it_goes_on_as_the_saver(saver: str, four_processes: Workers, tmp_path: Path) -> None:
    layout = ALL[saver]
    saved: list[Resumed] = run_on(
        four_processes, stage(layout), layout.ranks, training_runs.train_and_save, 2, 3, tmp_path / "saved"
    )
    assert saved[0].learning_rates[0] > 0
    for name in loaders(saver, LAYOUTS if saver in LAYOUTS else ALL):
        layout, folder = ALL[name], tmp_path / name
        shutil.copytree(tmp_path / "saved", folder)
        loaded: list[Resumed] = run_on(
            four_processes, stage(layout), layout.ranks, training_runs.load_and_train, 2, 3, folder, True
        )
        assert loaded[0].learning_rates == saved[0].learning_rates
        for step, reference in zip(loaded[0].steps, saved[0].steps, strict=True):
            assert step.loss == pytest.approx(reference.loss, rel=1e-5), name
            assert step.grad_norm == pytest.approx(reference.grad_norm, rel=1e-5), name
        # What the loader starts from, read from disk as whole tensors, is what it was given: save, load, save.
        first, second = (training_runs.whole_tensors(folder / step) for step in ("step-2", "loaded-2"))
        assert first.keys() == second.keys()
        for key, value in first.items():
            assert torch.equal(value, second[key]), f"{key} under {name}"


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ("tp2-sp", "fp32"),
        ("dp2-distopt", "bf16"),
        ("dp2", "bf16"),
        ("pp2", "bf16"),
        ("pp2-vpp2", "fp32"),
        ("cp2-distopt", "bf16"),
    ],
)
def test_same_layout_goes_on_bit_for_bit(layout: str, precision: str, four_processes: Workers, tmp_path: Path) -> None:
    config = stage(LAYOUTS[layout], train={"precision": precision})
    saved = four_processes.run_on(2, training_runs.train_and_save, config, 2, 2, tmp_path)
    loaded = four_processes.run_on(2, training_runs.load_and_train, config, 2, 2, tmp_path, False)
    for rank in range(2):
        assert loaded[rank].steps == saved[rank].steps
        for name, value in saved[rank].state.items():
            assert torch.equal(value, loaded[rank].state[name]), name


@pytest.mark.parametrize("layout", ["dp2", "dp2-distopt", "cp2", "cp2-distopt", "tp2", "pp2"])
def test_ranks_share_the_writing(layout: str, two_processes: Workers, tmp_path: Path) -> None:
    elements = two_processes.run(training_runs.elements_of_share, stage(LAYOUTS[layout]))
    whole = run_on(two_processes, stage(Layout()), 1, training_runs.elements_of_share)
    assert sum(elements) == sum(whole)
    # The distributed optimizer pads its pieces; one of two tensor-parallel ranks has what both hold; stages are uneven.
    bound = {"dp2": 0.501, "dp2-distopt": 0.52, "cp2": 0.501, "cp2-distopt": 0.52, "tp2": 0.6, "pp2": 0.8}[layout]
    assert max(elements) <= bound * sum(elements)


@pytest.mark.parametrize("background", [False, True])
def test_save_that_one_rank_cannot_write_fails_on_both(
    background: bool, two_processes: Workers, tmp_path: Path
) -> None:
    messages = two_processes.run(
        training_runs.save_with_a_full_disk_on_one_rank, stage(LAYOUTS["tp2"]), tmp_path, background
    )
    assert messages[0] == messages[1]
    assert "step-2: could not be saved (rank 1: no space left on the disk" in messages[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]


def test_a_save_counts_when_the_slowest_rank_has_written(two_processes: Workers, tmp_path: Path) -> None:
    saved = two_processes.run(training_runs.save_while_one_rank_is_slow, stage(LAYOUTS["dp2"]), tmp_path)
    assert saved == [[None, None, None, 1, 1]] * 2


def flip_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_flipped_bit_in_any_ranks_file_is_found_by_all(two_processes: Workers, tmp_path: Path) -> None:
    for step in (1, 2):
        two_processes.run(training_runs.train_and_save, stage(LAYOUTS["dp2"]), step, 0, tmp_path)
    found = two_processes.run(training_runs.verify, tmp_path)
    assert [name for name, _ in found] == ["step-2"] * 2
    read = [set(files) for _, files in found]
    assert not read[0] & read[1]
    manifest = json.loads((tmp_path / "step-2" / "manifest.json").read_text())
    assert read[0] | read[1] == {f"step-2/{name}" for name in manifest}
    # A rank's own file is about half of all.
    sizes = [sum(manifest[name.removeprefix("step-2/")]["bytes"] for name in files) for files in read]
    assert max(sizes) < 0.7 * sum(sizes)
    for file in sorted((tmp_path / "step-2").glob("*.distcp")):
        flip_bit(file)
        assert [name for name, _ in two_processes.run(training_runs.verify, tmp_path)] == ["step-1"] * 2
        flip_bit(file)
    assert [name for name, _ in two_processes.run(training_runs.verify, tmp_path)] == ["step-2"] * 2


def test_folder_that_is_not_shared_is_refused_on_all_ranks(two_processes: Workers, tmp_path: Path) -> None:
    messages = two_processes.run(training_runs.require_own_folder, tmp_path)
    assert messages[0].startswith("output_dir: the ranks 1 do not see what rank 0 writes to")
    assert messages[0].split(" writes to")[0] == messages[1].split(" writes to")[0]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
