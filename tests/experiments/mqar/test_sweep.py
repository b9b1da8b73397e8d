"""Sweeps through the command line: cut and gone on with, shared, limited in time, refused."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.mqar import write_recipe
from helpers.runs import run_ranks
from safetensors.torch import load_file

from megatron_palimpsa import cli
from megatron_palimpsa.experiments.mqar import report, sweep
from megatron_palimpsa.experiments.mqar import run as run_module
from megatron_palimpsa.experiments.mqar.config import load_sweep
from megatron_palimpsa.experiments.mqar.examples import Examples, Shape, make_examples, train_seed
from megatron_palimpsa.experiments.mqar.learner import Learner
from megatron_palimpsa.experiments.mqar.records import Run, next_epoch, read_records, runs_of, tokens_left
from megatron_palimpsa.experiments.mqar.sweep import in_turn

EPOCHS = 5
STEPS = 3 * 2 + 2 * 4


class Killed(BaseException):
    """What ends a process without its doing."""


def without_time(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]


def mqar(*arguments: object) -> int:
    return cli.main(["mqar", *map(str, arguments)])


def only_run(recipe: Path) -> Run:
    (run,) = runs_of(load_sweep(recipe))
    return run


@pytest.fixture
def kept_checkpoints(monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], Path]:
    """Where a finished run's last checkpoint stays for the test."""

    def keep(run: Run, result: dict[str, Any]) -> None:
        os.link(run.checkpoint, run.folder / "last.safetensors")
        write_result(run, result)

    write_result = run_module.write_result
    monkeypatch.setattr(run_module, "write_result", keep)
    return lambda run: run.folder / "last.safetensors"


@pytest.mark.usefixtures("no_report")
def test_a_sweep_cut_anywhere_ends_with_the_bits_of_an_unbroken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_checkpoints: Callable[[Run], Path]
) -> None:
    whole, cut = write_recipe(tmp_path, "whole"), write_recipe(tmp_path, "cut")
    assert mqar(whole) == 0
    steps, saves = [0], [0]
    step, save = Learner.step, run_module._save

    def step_or_die(self: Learner, *arguments: Any) -> torch.Tensor:
        steps[0] += 1
        if steps[0] in (1, 6, 10, 13):
            raise Killed
        return step(self, *arguments)

    def save_or_die(*arguments: Any) -> None:
        saves[0] += 1
        if saves[0] == 3:  # before the first lesson's last epoch is saved
            raise Killed
        save(*arguments)
        if saves[0] == 5:
            raise Killed

    monkeypatch.setattr(Learner, "step", step_or_die)
    monkeypatch.setattr(run_module, "_save", save_or_die)
    code, deaths = None, 0
    while code is None:
        try:
            code = mqar(cut)
        except Killed:
            deaths += 1
    assert (code, deaths) == (0, 6)
    runs = only_run(whole), only_run(cut)
    records = [read_records(run) for run in runs]
    assert len(records[0]) == EPOCHS
    assert without_time(records[1]) == without_time(records[0])
    tensors = [load_file(kept_checkpoints(run)) for run in runs]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())
    assert {name.partition(".")[0] for name in tensors[0]} == {"weights", "exp_avg", "exp_avg_sq", "step"}
    assert not any(run.checkpoint.exists() for run in runs)


def _die_in_step(arguments: list[str], environment: dict[str, str], at: int) -> None:
    """A rank of `run_ranks`."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    step, count = Learner.step, [0]

    def step_or_die(self: Learner, *rest: Any) -> torch.Tensor:
        count[0] += 1
        if count[0] == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, *rest)

    Learner.step = step_or_die  # type: ignore[method-assign]
    mqar(*arguments)


@pytest.mark.long
def test_a_killed_process_leaves_its_last_epoch_and_no_lock(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    assert run_ranks(_die_in_step, [str(recipe)], [4], seconds=300) == [-signal.SIGKILL]
    run = only_run(recipe)
    assert len(read_records(run)) == 1
    assert run.checkpoint.exists()
    assert mqar(recipe) == 0
    assert len(read_records(run)) == EPOCHS


def test_another_setting_is_refused_and_more_runs_may_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path)
    trained: list[str] = []
    monkeypatch.setattr(run_module, "Learner", _NoTraining)
    monkeypatch.setattr(_NoTraining, "seen", trained)
    assert mqar(recipe) == 0
    assert mqar(recipe, "train.examples=10", "curriculum=[{length: 8, pairs: 2, epochs: 3, batch_size: 4}]") == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert "holds runs with other settings" in message
    assert "train.examples=10 (there 9)" in message
    assert "curriculum.1.length=None (there 16)" in message
    assert trained == ["0.01 0"]
    # A folder from before there was such a setting.
    settings = tmp_path / "runs" / "tiny" / "settings.yaml"
    older = yaml.safe_load(settings.read_text())
    del older["task"]["power"], older["model"]["a_min"]
    settings.write_text(yaml.safe_dump(older))
    assert mqar(recipe, "sweep.seeds=[0,1]", "sweep.lrs=[0.01,0.02]") == 0
    assert trained == ["0.01 0", "0.02 0", "0.01 1", "0.02 1"]
    assert "| tiny | 16 | 3 |" in (tmp_path / "runs" / "report" / "report.md").read_text()
    assert (tmp_path / "runs" / "report" / "accuracy.png").stat().st_size > 1000


class _NoTraining:
    """Stands for a Learner and learns nothing."""

    seen: list[str] = []  # noqa: RUF012
    batches: list[Any] = []  # noqa: RUF012
    device = torch.device("cpu")
    model = torch.nn.Identity()

    def __init__(self, config: object, lr: float, seed: int) -> None:
        self.seen.append(f"{lr} {seed}")
        self._seed = seed

    def begin_lesson(self) -> None:
        pass

    def step(self, batch: Examples, fraction: float) -> torch.Tensor:
        self.batches.append((batch.tokens.tolist(), fraction))
        return torch.tensor(1.0)

    def evaluate(self, examples: object, batch_size: int) -> tuple[float, float, dict[int, dict[str, float]]]:
        return 0.25 + 0.1 * self._seed, 2.0, {1: {"window": 4.0, "importance_ratio": 0.5}, 2: {"window": 8.0}}

    def state(self) -> dict[str, torch.Tensor]:
        return {"weights.a": torch.zeros(1)}

    def load(self, tensors: object, with_moments: bool) -> None:
        pass


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take longer than tiny runs."""
    monkeypatch.setattr(report, "build", lambda output_dir: None)


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch, no_report: None) -> None:
    monkeypatch.setattr(run_module, "Learner", _NoTraining)
    monkeypatch.setattr(_NoTraining, "seen", [])
    monkeypatch.setattr(_NoTraining, "batches", [])


@pytest.mark.usefixtures("no_training")
def test_an_epoch_is_all_examples_in_an_order_of_its_own(tmp_path: Path) -> None:
    assert mqar(write_recipe(tmp_path)) == 0
    assert len(_NoTraining.batches) == STEPS
    made = make_examples(Shape(32, 8, 2), train_seed(0), torch.arange(9)).tokens.tolist()
    orders = []
    for start in (0, 2, 4):
        rows = [row for tokens, _ in _NoTraining.batches[start : start + 2] for row in tokens]
        orders.append([made.index(row) for row in rows])
        assert len(set(orders[-1])) == 8  # two full batches of the nine
    assert len({tuple(order) for order in orders}) == 3
    # Each lesson has its own schedule: two steps of warm-up, then down to almost nothing.
    fractions = [fraction for _, fraction in _NoTraining.batches]
    for first, last in ((0, 6), (6, STEPS)):
        assert fractions[first : first + 3] == [0.5, 1.0, 1.0]
        assert fractions[last - 1] == min(fractions[first:last]) < 0.2


@pytest.mark.usefixtures("no_training")
def test_time_and_other_processes_are_respected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path)
    # A ten-thousandth of a second is over when everything is loaded.
    assert mqar(recipe, "--minutes", "1e-6") == 75
    assert "1 of 1 runs are left: the same command goes on with them" in capsys.readouterr().out
    run = only_run(recipe)
    assert read_records(run) == []
    with run.locked() as mine:
        assert mine
        assert mqar(recipe, "sweep.seeds=[0,1]") == 75
    assert [read_records(run) != [] for run in runs_of(load_sweep(recipe, ["sweep.seeds=[0,1]"]))] == [False, True]
    output = capsys.readouterr().out
    assert "tiny lr 0.01 seed 1 | length 16 epoch 2/2 | loss 1.0000 | accuracy 0.3500" in output
    assert "0:00:00 left, of all runs about" in output
    assert mqar(recipe, "--report") == 0
    assert _NoTraining.seen == ["0.01 0", "0.01 1"]


@pytest.mark.usefixtures("no_training")
def test_a_run_whose_holder_was_killed_is_taken_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, killed = write_recipe(tmp_path), contextlib.ExitStack()
    killed.enter_context(only_run(recipe).locked())
    monkeypatch.setattr(_NoTraining, "begin_lesson", lambda self: killed.close())
    assert mqar(recipe, "sweep.seeds=[0,1]") == 0
    assert _NoTraining.seen == ["0.01 1", "0.01 0"]


@pytest.mark.usefixtures("no_training")
def test_no_more_processes_than_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], int]] = []
    monkeypatch.setattr(sweep, "work_in_processes", lambda arguments, count: started.append((arguments[-2:], count)))
    recipe = write_recipe(tmp_path)
    assert mqar(recipe, "sweep.seeds=[0,1,2]", "--jobs", "100000") == 75
    assert started == [(["--worker-of", "3"], 3)]
    assert mqar(recipe, "--jobs", "100000") == 0
    assert (len(started), _NoTraining.seen) == (1, ["0.01 0"])


@pytest.mark.usefixtures("no_training")
def test_a_test_loss_that_is_not_finite_is_said_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_NoTraining, "evaluate", lambda *_: (0.5, math.nan, {}))
    assert mqar(write_recipe(tmp_path)) == 0
    assert "epoch 1/3 | loss not finite | accuracy 0.5000" in capsys.readouterr().out


def test_a_run_that_diverges_ends_there(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, sweep={"lrs": [1e28]})
    assert mqar(recipe) == 0
    result = json.loads(only_run(recipe).result.read_text())
    assert result["diverged"]
    assert len(result["records"]) < EPOCHS
    assert result["records"][-1]["loss"] is None


def test_runs_take_turns_by_seed(tmp_path: Path) -> None:
    runs = {"lrs": [0.01, 0.02], "seeds": [3, 1]}
    configs = [load_sweep(write_recipe(tmp_path, name, sweep=runs)) for name in ("a", "b")]
    assert [(run.seed, run.lr, run.config.name) for run in in_turn(configs)] == [
        (seed, lr, name) for seed in (3, 1) for lr in (0.01, 0.02) for name in ("a", "b")
    ]


def test_a_lesson_may_end_early(tmp_path: Path) -> None:
    config = load_sweep(write_recipe(tmp_path), ["train.stop_at_accuracy=0.9"])
    run = runs_of(config)[0]

    def epoch(lesson: int, number: int, accuracy: float) -> dict[str, Any]:
        return {"lesson": lesson, "epoch": number, "accuracy": accuracy, "train_loss": 1.0, "loss": 1.0}

    assert next_epoch(config, []) == (0, 0)
    assert next_epoch(config, [epoch(0, 0, 0.9)]) == (0, 1)
    assert next_epoch(config, [epoch(0, 0, 0.91)]) == (1, 0)
    assert next_epoch(config, [epoch(0, 2, 0.1)]) == (1, 0)
    assert next_epoch(config, [epoch(1, 1, 0.1)]) is None
    assert next_epoch(config, [epoch(1, 0, 0.95)]) is None
    assert next_epoch(config, [{**epoch(0, 0, 0.1), "loss": None}]) is None
    # 2 steps of 4 examples of 8 tokens, 4 steps of 2 examples of 16 tokens.
    assert tokens_left(run, []) == 3 * 64 + 2 * 128
    assert tokens_left(run, [epoch(0, 1, 0.1)]) == 64 + 2 * 128
    assert tokens_left(run, [epoch(0, 0, 0.95)]) == 2 * 128
    assert tokens_left(run, [epoch(1, 1, 0.1)]) == 0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("curriculum.0=1", "curriculum"),
        ("model.pattern=PX", "model.pattern='PX': unknown letter 'X'"),
        ("model.seq_length=8", "model.seq_length=8 is below the longest lesson, which has 16"),
        ("model.vocab_size=1", "curriculum.0.pairs=2: model.vocab_size=1 has 0 keys"),
        ("model.vocab_size=100M", "model.vocab_size=100000000 is above 16777216, behind which examples"),
        ("train.examples=1000000000000", "train.examples=1000000000000 is above 549755813888"),
        ("task.power=1000", "task.power=1000: Input should be less than or equal to 10"),
        ("name=report", "name='report' is the folder of the report"),
        ("model.vocab_size=6", "curriculum.1.pairs=3: model.vocab_size=6 has 2 keys"),
        ("train.examples=3", "curriculum.0.batch_size=4 is above train.examples=3"),
        ("train.warmup_steps=6", "curriculum.0: train.warmup_steps=6 leaves nothing of the lesson\n"),
        ("sweep.seeds=[1,1]", "sweep.seeds=[1, 1] names one twice"),
        ("sweep.lrs=[]", "sweep.lrs=[]"),
        ("sweep.lrs=[0]", "sweep.lrs.0=0: Input should be greater than 0\n"),
        ("task.fill=blank", "unknown key 'task.fill'; known keys are filler, power"),
        ("curriculum=[{length: 10, pairs: 3, epochs: 1, batch_size: 1}]", "length=10 must be even and at least"),
        ("curriculum=[{length: 8, pairs: 1, epochs: 1, batches: 1}]", "known keys are length, pairs, epochs"),
    ],
)
def test_wrong_recipes_are_one_message_and_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, expected: str
) -> None:
    recipe = write_recipe(tmp_path)
    if change.startswith("curriculum.0="):
        recipe.write_text(yaml.safe_dump({**yaml.safe_load(recipe.read_text()), "curriculum": [1]}))
        change = "name=tiny"
    assert mqar(recipe, change) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert "Traceback" not in error
    assert "validation" not in error or "[]" in error
    assert not (tmp_path / "runs").exists()


def test_two_recipes_of_one_name_or_of_two_places_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    one, same, elsewhere = write_recipe(tmp_path), write_recipe(tmp_path), write_recipe(tmp_path / "there", "other")
    assert mqar(one, same) == 2
    assert "two recipes have one folder" in capsys.readouterr().err
    assert mqar(one, elsewhere) == 2
    assert "recipes write to different folders" in capsys.readouterr().err
    assert mqar(one, elsewhere, "--report") == 2
    assert "recipes write to different folders" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("no_training")
def test_a_recipe_may_lie_below_a_folder_with_an_equals_sign(tmp_path: Path) -> None:
    (folder := tmp_path / "state=16").mkdir()
    assert mqar(write_recipe(folder), "sweep.seeds=[3]") == 0
    assert _NoTraining.seen == ["0.01 3"]


@pytest.mark.usefixtures("no_training")
def test_a_place_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path)
    assert mqar(recipe, f"output_dir={recipe}/runs") == 2
    assert f"output_dir: {recipe} is not a folder" in capsys.readouterr().err
    assert mqar(recipe) == 0
    sweep_folder = tmp_path / "runs" / "tiny"
    before = sorted(sweep_folder.iterdir())
    assert mqar(recipe, f"output_dir={sweep_folder}", "name=inner") == 2
    assert f"output_dir='{sweep_folder}' is the folder of a sweep" in capsys.readouterr().err
    assert sorted(sweep_folder.iterdir()) == before


def test_a_launcher_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert mqar(write_recipe(tmp_path)) == 2
    assert "mqar is not for torchrun" in capsys.readouterr().err
