"""The DeepSpeed engine computes what one process of the Megatron engine does, and its checkpoints are the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import training_runs
from helpers.layout_table import STEPS, Layout, Pipeline, stage
from helpers.same_function import FP32, Deviations, assert_same_function
from helpers.training_runs import Resumed, Run
from helpers.workers import Workers
from helpers.zero_stages import zero_stage

from megatron_palimpsa import parallel
from megatron_palimpsa.config import LossScaleConfig, StageConfig

pytest.importorskip("deepspeed")
psutil = pytest.importorskip("psutil")

BF16 = Deviations(loss=1e-6, grad_norm=1e-6, gradient=1e-6, weight=4e-3, token_loss=1e-4)
FP16 = Deviations(loss=5e-4, grad_norm=2e-3, gradient=1e-2, weight=3e-3, token_loss=3e-2)

LAYOUTS = {
    "one": Layout(),
    "dp2": Layout(dp=2),
    "dp2-untied": Layout(dp=2, tied=False),
    "tp2": Layout(tp=2),
    "tp2-sp": Layout(tp=2, sequence_parallel=True),
    "tp2-g2-untied": Layout(tp=2, ngroups=2, tied=False),
    "cp2": Layout(cp=2),
    "pp2": Layout(pipeline=Pipeline(2, 1)),
    "pp2-untied": Layout(pipeline=Pipeline(2, 1), tied=False),
}
LARGE_LAYOUTS = {
    "one-untied": Layout(tied=False),
    "tp2-sp-dp2": Layout(tp=2, sequence_parallel=True, dp=2),
    "tp2-dp2-untied": Layout(tp=2, dp=2, tied=False),
    "dp4": Layout(dp=4),
    "pp2-dp2": Layout(pipeline=Pipeline(2, 1), dp=2),
    "pp2-dp2-untied": Layout(pipeline=Pipeline(2, 1), dp=2, tied=False),
    "tp2-sp-pp2": Layout(tp=2, sequence_parallel=True, pipeline=Pipeline(2, 1)),
    "tp2-pp2-untied": Layout(tp=2, pipeline=Pipeline(2, 1), tied=False),
    "tp2-pp2-dp2": Layout(tp=2, pipeline=Pipeline(2, 1), dp=2),
    "tp2-sp-pp2-dp2-untied": Layout(tp=2, sequence_parallel=True, pipeline=Pipeline(2, 1), dp=2, tied=False),
}


OFTEN = {"one": (3,), "dp2": (0, 1, 2, 3), "dp2-untied": (2,), "tp2-sp": (0, 1, 2, 3), "tp2-g2-untied": (1, 3)}
OFTEN |= {"cp2": (3,), "pp2": (0, 1), "pp2-untied": (1,)}
"""Which stages of a layout are among the tests of every change; the others are with the long ones."""


def long_unless(often: bool) -> list[pytest.MarkDecorator]:
    return [] if often else [pytest.mark.long]


def cases(layouts: dict[str, Layout]) -> list[Any]:
    return [
        pytest.param(layout, zero, id=f"{name}-zero{zero}", marks=long_unless(zero in OFTEN.get(name, ())))
        for name, layout in layouts.items()
        for zero in (0, 1, 2, 3)
        if layout.pipeline.pp == 1 or zero < 2
    ]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Workers]]:
    """Processes for each size: DeepSpeed numbers modules over a process's life, and the numbers must agree."""
    by_size: dict[int, Workers] = {}

    def of(size: int) -> Workers:
        if size not in by_size:
            by_size[size] = Workers(size)
        return by_size[size]

    yield of
    for workers in by_size.values():
        workers.close()


@pytest.fixture(scope="module")
def two_ranks(ranks: Callable[[int], Workers]) -> Workers:
    return ranks(2)


@pytest.mark.parametrize(("layout", "zero"), cases(LAYOUTS | LARGE_LAYOUTS))
def test_a_zero_stage_computes_what_one_process_does(
    layout: Layout,
    zero: int,
    ranks: Callable[[int], Workers],
    one_process_run: Callable[[StageConfig, int], Run],
) -> None:
    runs = ranks(layout.ranks).run(training_runs.train, zero_stage(layout, zero), STEPS)
    expected = one_process_run(stage(layout.one_process), STEPS)
    assert_same_function(runs, expected, layout.tp, FP32)


@pytest.mark.long
@pytest.mark.parametrize(("zero", "recompute"), [(1, "none"), (3, "selective")])
def test_so_it_does_with_palimpsa_d(
    zero: int, recompute: str, two_ranks: Workers, one_process_run: Callable[[StageConfig, int], Run]
) -> None:
    # Slow decay, as in test_layouts.py.
    changes: dict[str, Any] = {
        "model": {"pattern": "QL*-", "a_min": 0.1, "a_max": 1.0},
        "train": {"recompute": recompute},
    }
    layout = Layout(tp=2, sequence_parallel=True)
    runs = two_ranks.run(training_runs.train, zero_stage(layout, zero, **changes), STEPS)
    assert_same_function(runs, one_process_run(stage(layout.one_process, **changes), STEPS), layout.tp, FP32)


@pytest.mark.parametrize("zero", [1, 3])
def test_process_groups_and_their_threads_end_with_the_engine(zero: int, ranks: Callable[[int], Workers]) -> None:
    counts = []
    for _ in range(3):
        ranks(1).run(training_runs.train, zero_stage(Layout(), zero), 1)
        counts += ranks(1).run(running_threads)
    # The first engine may start some that serve all.
    assert counts[2] == counts[1]


def running_threads() -> int:
    return psutil.Process().num_threads()


OFFLOAD = {"offload_optimizer": True}
OFFLOAD_ALL = {"offload_optimizer": True, "offload_parameters": True}
SMALL = {
    "reduce_bucket_size": 700,
    "stage3_prefetch_bucket_size": 600,
    "stage3_param_persistence_threshold": 40,
    "stage3_max_live_parameters": 2000,
    "stage3_max_reuse_distance": 500,
    "sub_group_size": 3000,
}
HPZ = {"zero_hpz_partition_size": 2}
OVERLAP = {"overlap_comm": True}
WITH_SETTINGS = {
    "dp2-zero1-offload": (Layout(dp=2), 1, OFFLOAD),
    "dp2-zero2-offload": (Layout(dp=2), 2, OFFLOAD),
    "tp2-sp-zero3-offload-all": (Layout(tp=2, sequence_parallel=True), 3, OFFLOAD_ALL),
    "dp2-zero3-offload-all-small": (Layout(dp=2), 3, {**OFFLOAD_ALL, **SMALL}),
    "dp2-zero2-small": (Layout(dp=2), 2, {"reduce_bucket_size": 700, "allgather_bucket_size": 600}),
    "dp2-zero3-hpz": (Layout(dp=2), 3, HPZ),
    "dp2-zero2-overlap": (Layout(dp=2), 2, OVERLAP),
    "dp2-zero3-overlap": (Layout(dp=2), 3, OVERLAP),
}
LONG_WITH_SETTINGS = {
    "pp2-zero1-offload": (Layout(pipeline=Pipeline(2, 1)), 1, OFFLOAD),
    "dp2-zero3-small": (Layout(dp=2), 3, SMALL),
    "dp2-zero3-hpz-offload-all": (Layout(dp=2), 3, {**HPZ, **OFFLOAD_ALL}),
    "dp2-zero3-overlap-offload-all": (Layout(dp=2), 3, {**OVERLAP, **OFFLOAD_ALL}),
    "dp4-zero3-hpz": (Layout(dp=4), 3, HPZ),
    "tp2-dp2-zero3-hpz": (Layout(tp=2, dp=2), 3, HPZ),
}


@pytest.mark.parametrize(
    ("layout", "zero", "settings"),
    [
        pytest.param(*case, id=name, marks=long_unless(name in WITH_SETTINGS))
        for name, case in (WITH_SETTINGS | LONG_WITH_SETTINGS).items()
    ],
)
def test_where_things_lie_and_in_which_portions_they_move_changes_nothing(
    layout: Layout,
    zero: int,
    settings: dict[str, Any],
    ranks: Callable[[int], Workers],
    one_process_run: Callable[[StageConfig, int], Run],
) -> None:
    runs = ranks(layout.ranks).run(training_runs.train, zero_stage(layout, zero, settings), STEPS)
    assert_same_function(runs, one_process_run(stage(layout.one_process), STEPS), layout.tp, FP32)


@cache
def one_process_refusing(refused: tuple[int, ...], steps: int) -> Run:
    try:
        return training_runs.train_refusing(stage(Layout()), refused, steps)
    finally:
        parallel.destroy()


HALF_WITH_SETTINGS = [
    (1, {}),
    (2, {}),
    (3, OFFLOAD_ALL),
    *(pytest.param(*case, marks=pytest.mark.long) for case in [(0, {}), (3, {}), (1, OFFLOAD), (2, OFFLOAD)]),
]


@pytest.mark.parametrize(("zero", "settings"), HALF_WITH_SETTINGS)
def test_bf16_is_that_of_the_megatron_engine(
    zero: int, settings: dict[str, Any], two_ranks: Workers, one_process_run: Callable[[StageConfig, int], Run]
) -> None:
    runs = two_ranks.run(
        training_runs.train, zero_stage(Layout(dp=2), zero, settings, train={"precision": "bf16"}), STEPS
    )
    assert_same_function(runs, one_process_run(stage(Layout(), train={"precision": "bf16"}), STEPS), 1, BF16)


@pytest.mark.parametrize(("zero", "settings"), HALF_WITH_SETTINGS)
def test_fp16_follows_fp32(
    zero: int, settings: dict[str, Any], two_ranks: Workers, one_process_run: Callable[[StageConfig, int], Run]
) -> None:
    settings = {**settings, "fp16": LossScaleConfig(initial_scale_power=8)}
    config = zero_stage(Layout(dp=2), zero, settings, train={"precision": "fp16"})
    runs = two_ranks.run(training_runs.train, config, STEPS)
    assert_same_function(runs, one_process_run(stage(Layout()), STEPS), 1, FP16)


@pytest.mark.parametrize(("zero", "settings"), [(1, {}), (2, OFFLOAD), (3, {})])
def test_steps_that_overflow_in_fp16_are_skipped_until_the_scale_is_small_enough(
    zero: int, settings: dict[str, Any], two_ranks: Workers
) -> None:
    scale = LossScaleConfig(initial_scale_power=18, hysteresis=1)
    config = zero_stage(Layout(dp=2), zero, {**settings, "fp16": scale}, train={"precision": "fp16"})
    runs: list[Run] = two_ranks.run(training_runs.train_refusing, config, None, 10)
    skipped = tuple(number for number, step in enumerate(runs[0].steps) if not step.applied)
    assert 1 < len(skipped) < 8
    assert skipped == tuple(range(len(skipped)))
    expected = one_process_refusing(skipped, 10)
    steps = expected.steps[len(skipped) :]
    for rank in runs:
        assert [step.loss for step in rank.steps] == pytest.approx([step.loss for step in expected.steps], rel=1e-3)
        norms = [step.grad_norm for step in rank.steps[len(skipped) :]]
        assert norms == pytest.approx([step.grad_norm for step in steps], rel=5e-3)
        assert rank.learning_rates == expected.learning_rates


@pytest.mark.parametrize(
    ("zero", "settings"),
    [
        (1, {}),
        (2, {}),
        (3, {}),
        (2, OFFLOAD),
        pytest.param(1, OFFLOAD, marks=pytest.mark.long),
        pytest.param(3, OFFLOAD, marks=pytest.mark.long),
    ],
)
def test_a_refused_step_and_evaluations_leave_nothing_behind(
    zero: int, settings: dict[str, Any], two_ranks: Workers, one_process_run: Callable[[StageConfig, int], Run]
) -> None:
    runs: list[Run] = two_ranks.run(training_runs.train_refusing, zero_stage(Layout(dp=2), zero, settings), (1,))
    expected = one_process_refusing((1,), 4)
    assert [step.applied for step in runs[0].steps] == [True, False, True, True]
    assert_same_function(runs, expected, 1, FP32)


def resumed() -> Iterator[Any]:
    sequence = Layout(tp=2, sequence_parallel=True)
    kept = [(Layout(dp=2), zero, {}) for zero in (0, 1, 2, 3)] + [(sequence, 3, {})]
    offloaded = [(Layout(dp=2), 1, OFFLOAD), (Layout(dp=2), 2, OFFLOAD), (sequence, 3, OFFLOAD_ALL)]
    often = {("bf16", index) for index in (1, 3, 5)} | {("fp32", 2), ("fp32", 7), ("fp16", 3)}
    for precision in ("fp32", "bf16", "fp16"):
        for index, (layout, zero, settings) in enumerate([*kept, *offloaded]):
            marks = long_unless((precision, index) in often)
            name = f"{precision}-{layout.name}-zero{zero}{'-offload' if settings else ''}"
            yield pytest.param(layout, zero, settings, precision, id=name, marks=marks)


@pytest.mark.parametrize(("layout", "zero", "settings", "precision"), list(resumed()))
def test_resumed_it_goes_on_bit_for_bit(
    layout: Layout, zero: int, settings: dict[str, Any], precision: str, two_ranks: Workers, tmp_path: Path
) -> None:
    config = zero_stage(layout, zero, settings, train={"precision": precision})
    saved: list[Resumed] = two_ranks.run(training_runs.train_and_save, config, 2, 2, tmp_path)
    loaded: list[Resumed] = two_ranks.run(training_runs.load_and_train, config, 2, 2, tmp_path, False)
    for before, after in zip(saved, loaded, strict=True):
        assert after.steps == before.steps
        assert after.learning_rates == before.learning_rates
        assert after.schedule == before.schedule
        assert ("loss_scale" in after.schedule) == (precision == "fp16")
        for name, value in before.state.items():
            assert torch.equal(value, after.state[name]), name


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_engines_exchange_checkpoints(zero: int, two_ranks: Workers, tmp_path: Path) -> None:
    """Megatron saves, DeepSpeed loads and saves again, Megatron goes on from that: nothing is lost or changed."""
    megatron = stage(Layout(tp=2))
    deepspeed = zero_stage(Layout(dp=2), zero)
    saved = two_ranks.run(training_runs.train_and_save, megatron, 2, 2, tmp_path / "megatron")
    loaded = two_ranks.run(training_runs.load_and_train, deepspeed, 2, 2, tmp_path / "megatron", True)
    first, second = (training_runs.whole_tensors(tmp_path / "megatron" / name) for name in ("step-2", "loaded-2"))
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert torch.equal(value, second[key]), key
    shutil.copytree(tmp_path / "megatron" / "loaded-2", tmp_path / "again" / "step-2")
    again = two_ranks.run(training_runs.load_and_train, megatron, 2, 2, tmp_path / "again", False)
    assert again[0].steps == saved[0].steps
    for ours, theirs in zip(loaded[0].steps, saved[0].steps, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
