"""Tables, CSV and pictures of made-up runs."""

from __future__ import annotations

import csv
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.mqar import write_recipe
from matplotlib import pyplot as plt
from palimpsa_launch import stages
from safetensors.torch import save_file

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.experiments.mqar import pictures, report, summary
from megatron_palimpsa.experiments.mqar.config import SweepConfig, load_sweep
from megatron_palimpsa.experiments.mqar.files import lock
from megatron_palimpsa.experiments.mqar.folders import claim_folders
from megatron_palimpsa.experiments.mqar.records import Run, write_result

LENGTHS = ((0, 8, 2, 3), (1, 16, 3, 2))
"""Number, length, pairs and epochs of the tiny recipe's lessons."""


def epochs(accuracy: float, count: int, ratio: bool) -> list[dict[str, Any]]:
    """The first `count` of the five epochs; accuracy falls by half from the first lesson to the second."""
    all_of_them = [(*lesson, epoch) for lesson in LENGTHS for epoch in range(lesson[3])]
    memory = {"1": {"window": 10.0, "importance_ratio": 0.5} if ratio else {"window": 20.0}, "2": {"window": 30.0}}
    return [
        {
            "lesson": number,
            "length": length,
            "pairs": pairs,
            "epoch": epoch,
            "train_loss": 3.0 - accuracy,
            "accuracy": accuracy / (1 + number) * (epoch + 1) / last,
            "loss": 2.0,
            "memory": memory,
            "tokens": 64,
            "seconds": 0.5,
        }
        for number, length, pairs, last, epoch in all_of_them[:count]
    ]


@pytest.fixture
def configs(tmp_path: Path) -> list[SweepConfig]:
    """Model a: seeds 0 and 1 at two learning rates; b: one seed that is still in its second lesson."""
    a, b = (load_sweep(write_recipe(tmp_path, name)) for name in ("a", "b"))
    claim_folders([a, b])
    for seed, lr, accuracy in ((0, 0.01, 0.6), (0, 0.02, 0.8), (1, 0.01, 0.4), (1, 0.02, 0.3)):
        run = Run(a, lr, seed)
        run.folder.mkdir()
        write_result(run, {"model": "a", "lr": lr, "seed": seed, "records": epochs(accuracy, 5, ratio=True)})
    run = Run(b, 0.001, 0)
    run.folder.mkdir()
    save_file({}, run.checkpoint, {"records": json.dumps(epochs(0.5, 4, ratio=False))})
    return [a, b]


def test_each_seed_counts_with_the_learning_rate_that_is_best_for_it(configs: list[SweepConfig]) -> None:
    runs = [item for config in configs for item in summary.read_runs(config)]
    assert len(runs) == 5
    rows = summary.accuracies(runs)
    assert [(row.model, row.length, row.pairs) for row in rows] == [("a", 8, 2), ("a", 16, 3), ("b", 8, 2)]
    found = [{seed: (round(accuracy, 6), lr) for seed, (accuracy, lr) in row.by_seed.items()} for row in rows]
    assert found == [{0: (0.8, 0.02), 1: (0.4, 0.01)}, {0: (0.4, 0.02), 1: (0.2, 0.01)}, {0: (0.5, 0.001)}]
    assert rows[0].mean == pytest.approx(0.6)
    assert rows[0].spread == pytest.approx(0.4 / math.sqrt(2))
    assert math.isnan(rows[2].spread)
    lines = summary.table(rows).splitlines()
    assert lines[2] == "| a | 8 | 2 | 60.0 % | ± 28.3 | 40.0 % | 80.0 % | 2 | 0.01, 0.02 |"
    assert lines[4] == "| b | 8 | 2 | 50.0 % |  | 50.0 % | 50.0 % | 1 | 0.001 |"
    # 0.275 at 0.02, 0.25 at 0.01.
    assert summary.best_rate(runs[:4]) == 0.02


def test_files_hold_every_run(configs: list[SweepConfig], capsys: pytest.CaptureFixture[str]) -> None:
    # Of every sweep in the folder, whichever was trained last.
    written = report.build(configs[1].output_dir)
    assert written is not None
    assert "| a | 16 | 3 | 30.0 % |" in capsys.readouterr().out
    assert "| a | 16 | 3 | 30.0 % |" in written.read_text()
    with (written.parent / "accuracy.csv").open() as file:
        accuracy = list(csv.DictReader(file))
    assert [(row["model"], row["length"], row["lr"], row["seed"], row["epochs"]) for row in accuracy[:2]] == [
        ("a", "8", "0.01", "0", "3"),
        ("a", "16", "0.01", "0", "2"),
    ]
    assert len(accuracy) == 4 * 2 + 1
    with (written.parent / "training.csv").open() as file:
        training = list(csv.DictReader(file))
    assert len(training) == 4 * 5 + 4
    assert (training[0]["window_1"], training[0]["importance_ratio_1"], training[0]["window_2"]) == (
        "10.0",
        "0.5",
        "30.0",
    )
    assert training[-1]["importance_ratio_1"] == ""
    for name in ("accuracy.png", "training.png"):
        assert (written.parent / name).read_bytes().startswith(b"\x89PNG")


def test_pictures_show_the_numbers(configs: list[SweepConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[plt.Figure] = []
    monkeypatch.setattr(pictures, "save", lambda figure, path: figures.append(figure))
    runs = [item for config in configs for item in summary.read_runs(config)]
    pictures.draw_accuracy(summary.accuracies(runs), Path("accuracy.png"))
    pictures.draw_training(runs, Path("training.png"))
    (axes,) = figures[0].axes
    means = [line.get_xydata().tolist() for line, _, _ in axes.containers]
    assert [container.get_label() for container in axes.containers] == ["a", "b"]
    assert means == [[[8, pytest.approx(0.6)], [16, pytest.approx(0.3)]], [[8, 0.5]]]
    window, ratio, loss = figures[1].axes
    assert [line.get_label() for line in window.lines if not line.get_label().startswith("_")] == [
        "a (lr 0.02, 2 seeds), layer 1",
        "a (lr 0.02, 2 seeds), layer 2",
        "b (lr 0.001, 1 seed), layer 1",
        "b (lr 0.001, 1 seed), layer 2",
    ]
    (of_a,) = [line for line in ratio.lines if "layer" in line.get_label()]
    assert of_a.get_xydata().tolist() == [[epoch, 0.5] for epoch in range(1, 6)]
    of_loss = [line for line in loss.lines if not line.get_label().startswith("_")]
    # The median over the two seeds of 3 - 0.8 and 3 - 0.3.
    assert of_loss[0].get_ydata().tolist() == [pytest.approx(2.45)] * 5
    for figure in figures:
        plt.close(figure)


def test_other_folders_are_no_runs(configs: list[SweepConfig]) -> None:
    of_a = configs[0].folder
    shutil.copytree(of_a / "lr-0.01-seed-0", of_a / "lr-0.010-seed-0")
    (of_a / "lr-1.-.-seed-0").mkdir()
    found = [(item.run.lr, item.run.seed) for item in summary.read_runs(configs[0])]
    assert found == [(0.01, 0), (0.02, 0), (0.01, 1), (0.02, 1)]


def test_runs_that_diverged_are_named(configs: list[SweepConfig]) -> None:
    written = report.build(configs[0].output_dir)
    assert written is not None
    assert "not finite" not in written.read_text()
    run = Run(configs[0], 0.02, 1)
    records = epochs(0.3, 2, ratio=True)
    records[-1]["loss"] = None
    write_result(run, {"model": "a", "lr": 0.02, "seed": 1, "records": records})
    report.build(configs[0].output_dir)
    assert "Ended by a loss that was not finite, and in no row behind that: a lr 0.02 seed 1." in written.read_text()


def test_two_lessons_of_one_length_are_two_rows(tmp_path: Path) -> None:
    lesson = {"length": 8, "pairs": 2, "epochs": 1, "batch_size": 4}
    config = load_sweep(write_recipe(tmp_path, curriculum=[lesson, lesson]), ["train.warmup_steps=0"])
    records = [{**epochs(a, 1, ratio=True)[0], "lesson": n, "accuracy": a} for n, a in ((0, 0.75), (1, 0.25))]
    rows = summary.accuracies([summary.RunRecords(Run(config, 0.01, 0), records)])
    assert [(row.length, row.mean) for row in rows] == [(8, 0.75), (8, 0.25)]


def test_a_copied_sweep_does_not_count_twice(configs: list[SweepConfig]) -> None:
    shutil.copytree(configs[0].folder, configs[0].folder.with_name("a-before"))
    with pytest.raises(ConfigError, match=r"a-before/settings\.yaml is of the sweep a, whose folder is .*/runs/a;"):
        report.build(configs[0].output_dir)


def test_one_process_at_a_time_writes_the_report(configs: list[SweepConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    free = []

    def look(runs: object, path: Path) -> None:
        with lock(path.parent, wait=False) as mine:
            free.append(mine)

    monkeypatch.setattr(summary, "write_training_csv", look)
    assert report.build(configs[0].output_dir) is not None
    assert free == [False]


def test_no_epoch_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.build(load_sweep(write_recipe(tmp_path)).output_dir) is None
    assert "no report" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("name", "pattern"),
    [("palimpsa-m", "PP"), ("mamba2", "MM"), ("palimpsa-d", "QQ"), ("palimpsa-d-no-importance", "LL")],
)
def test_packaged_recipes_are_the_papers(name: str, pattern: str) -> None:
    config = load_sweep(stages.path(f"mqar/{name}"))
    small = load_sweep(stages.path(f"mqar/small/{name}"))
    assert (config.name, config.model.pattern) == (small.name, small.model.pattern * 2) == (name, pattern)
    assert [(lesson.length, lesson.pairs, lesson.epochs) for lesson in config.curriculum] == [
        (128, 32, 20), (256, 64, 20), (512, 128, 20), (1024, 256, 20),
    ]  # fmt: skip
    model = config.model
    assert (len(model.layers), model.hidden_size, model.nheads, model.d_state) == (2, 128, 8, 16)
    assert (model.d_inner, model.vocab_size) == (2 * 128, 8192)
    assert config.sweep.lrs == (1e-3, 2.15e-3, 4.64e-3, 1e-2)
    assert len(config.sweep.seeds) == 8
