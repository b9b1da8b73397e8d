"""The DeepSpeed engine on two GPUs over NCCL computes what the Megatron engine does on one, in fp32 and bf16.

Runs by itself on a machine without the rest of the project's dependencies:

    PYTHONPATH=.:kernels:tests python -m pytest --noconftest -c /dev/null -vs tests/distributed/test_gpu_deepspeed.py

`-s` shows how far each case was off. The names of the cases make parts for several processes: `-k "dp2 and fp32"`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import training_runs
from helpers.layout_table import Layout, Pipeline, stage
from helpers.same_function import BF16_GPU, FP32, assert_same_function
from helpers.training_runs import Resumed, Run
from helpers.workers import Workers
from helpers.zero_stages import zero_stage

from megatron_palimpsa.config import StageConfig

pytest.importorskip("deepspeed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

MODEL = {
    # ZeRO-3 leaves parameters of up to 100,000 elements whole: a projection has more, also of half the heads.
    "hidden_size": 384,
    "vocab_size": 1024,
    "ffn_hidden_size": 384,
    "seq_length": 256,
    "d_state": 32,
    "headdim": 32,
    "beta_rank": 16,
    "init_std": 0.05,
}
BOUNDS = {"fp32": FP32, "bf16": BF16_GPU}
STEPS = 4
SPREAD = {"dp2": {"dp": 2}, "tp2": {"tp": 2}, "tp2-sp": {"tp": 2, "sequence_parallel": True}}
PIPELINE = {"pp2": {"pipeline": Pipeline(2, 1)}}


NO_ATTENTION = {"pattern": "PM-P"}
"""Whose backward pass on CUDA need not give the same bits twice."""


def sections(precision: str, model: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
    """Overrides of a stage."""
    sizes = {"precision": precision, "global_batch_tokens": 1024, "tokens": 102400}
    # A gradient near 0 that rounding alone decides should not move a weight by the full rate.
    return {"model": {**MODEL, **(model or {})}, "train": {**sizes, **train}, "optimizer": {"eps": 1e-6}}


@pytest.fixture(scope="module")
def gpus() -> Iterator[Workers]:
    workers = Workers(2)
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def one_gpu() -> Iterator[Workers]:
    """Of its own: DeepSpeed numbers modules over a process's life, and the numbers of two ranks must agree."""
    workers = Workers(1)
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def on_one(gpus: Workers) -> Callable[[StageConfig], Run]:
    """What one GPU computes; equal models are trained once."""
    known: dict[str, Run] = {}

    def run(config: StageConfig) -> Run:
        key = repr(config)
        if key not in known:
            [known[key]] = gpus.run_on(1, training_runs.train, config, STEPS)
        return known[key]

    return run


def table() -> Iterator[Any]:
    for layouts, zeros in ((SPREAD, (0, 1, 2, 3)), (PIPELINE, (0, 1))):
        for name, sizes in layouts.items():
            for tied in (True, False):
                for zero in zeros:
                    row = f"{name}-{'tied' if tied else 'untied'}-zero{zero}"
                    yield pytest.param(Layout(tied=tied, **sizes), zero, id=row)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize(("layout", "zero"), table())
def test_two_gpus_compute_what_one_does(
    layout: Layout, zero: int, precision: str, gpus: Workers, on_one: Callable[[StageConfig], Run]
) -> None:
    expected = on_one(stage(layout.one_process, **sections(precision)))
    runs = gpus.run(training_runs.train, zero_stage(layout, zero, **sections(precision)), STEPS)
    assert_same_function(runs, expected, layout.tp, BOUNDS[precision])


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_alone_zero_computes_what_megatron_does(
    zero: int, precision: str, one_gpu: Workers, on_one: Callable[[StageConfig], Run]
) -> None:
    runs = one_gpu.run(training_runs.train, zero_stage(Layout(), zero, **sections(precision)), STEPS)
    assert_same_function(runs, on_one(stage(Layout(), **sections(precision))), 1, BOUNDS[precision])


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("zero", [2, 3])
def test_overlap_on_dp2_changes_nothing(
    zero: int, precision: str, gpus: Workers, on_one: Callable[[StageConfig], Run]
) -> None:
    config = zero_stage(Layout(dp=2), zero, {"overlap_comm": True}, **sections(precision))
    runs = gpus.run(training_runs.train, config, STEPS)
    assert_same_function(runs, on_one(stage(Layout(), **sections(precision))), 1, BOUNDS[precision])


OFFLOAD = {"offload_optimizer": True}
OFFLOAD_ALL = {"offload_optimizer": True, "offload_parameters": True}


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize(
    ("layout", "zero", "settings"),
    [
        (Layout(dp=2), 1, OFFLOAD),
        (Layout(dp=2), 2, OFFLOAD),
        (Layout(dp=2), 3, OFFLOAD),
        (Layout(dp=2), 3, OFFLOAD_ALL),
        (Layout(tp=2, sequence_parallel=True), 3, OFFLOAD_ALL),
    ],
    ids=["dp2-zero1", "dp2-zero2", "dp2-zero3", "dp2-zero3-all", "tp2-sp-zero3-all"],
)
def test_offload_changes_nothing(
    layout: Layout,
    zero: int,
    settings: dict[str, Any],
    precision: str,
    gpus: Workers,
    on_one: Callable[[StageConfig], Run],
) -> None:
    runs = gpus.run(training_runs.train, zero_stage(layout, zero, settings, **sections(precision)), STEPS)
    assert_same_function(runs, on_one(stage(Layout(), **sections(precision))), layout.tp, BOUNDS[precision])


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("zero", [2, 3])
def test_recomputation_on_dp2_changes_nothing(
    zero: int, recompute: str, gpus: Workers, on_one: Callable[[StageConfig], Run]
) -> None:
    """In stage 3 a step that runs again in the backward pass must find its weights."""
    config = zero_stage(Layout(dp=2), zero, **sections("fp32", recompute=recompute))
    runs = gpus.run(training_runs.train, config, STEPS)
    assert_same_function(runs, on_one(stage(Layout(), **sections("fp32"))), 1, FP32)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_refused_step_and_evaluations_on_dp2_leave_nothing_behind(zero: int, gpus: Workers) -> None:
    [expected] = gpus.run_on(1, training_runs.train_refusing, stage(Layout(), **sections("fp32")), (1,))
    runs = gpus.run(training_runs.train_refusing, zero_stage(Layout(dp=2), zero, **sections("fp32")), (1,))
    assert [step.applied for step in runs[0].steps] == [True, False, True, True]
    assert_same_function(runs, expected, 1, FP32)


@pytest.mark.parametrize(
    ("layout", "zero", "precision"),
    [
        (Layout(dp=2), 1, "bf16"),
        (Layout(dp=2), 2, "bf16"),
        (Layout(dp=2), 3, "bf16"),
        (Layout(dp=2), 3, "fp32"),
        (Layout(tp=2, sequence_parallel=True), 3, "bf16"),
    ],
    ids=["dp2-zero1-bf16", "dp2-zero2-bf16", "dp2-zero3-bf16", "dp2-zero3-fp32", "tp2-sp-zero3-bf16"],
)
def test_resumed_it_goes_on_bit_for_bit(
    layout: Layout, zero: int, precision: str, gpus: Workers, tmp_path: Path
) -> None:
    config = zero_stage(layout, zero, **sections(precision, NO_ATTENTION))
    saved: list[Resumed] = gpus.run(training_runs.train_and_save, config, 2, 2, tmp_path)
    loaded: list[Resumed] = gpus.run(training_runs.load_and_train, config, 2, 2, tmp_path, False)
    for before, after in zip(saved, loaded, strict=True):
        assert after.steps == before.steps
        assert after.learning_rates == before.learning_rates
        for name, value in before.state.items():
            assert torch.equal(value, after.state[name]), name


@pytest.mark.parametrize("zero", [1, 3])
def test_engines_exchange_checkpoints_over_dp2(zero: int, gpus: Workers, tmp_path: Path) -> None:
    """The Megatron engine saves, DeepSpeed loads and saves what it loaded: every number is the same."""
    before = stage(Layout(tp=2), **sections("bf16", NO_ATTENTION))
    gpus.run(training_runs.train_and_save, before, 2, 0, tmp_path)
    after = zero_stage(Layout(dp=2), zero, **sections("bf16", NO_ATTENTION))
    gpus.run(training_runs.load_and_train, after, 2, 0, tmp_path, True)
    first, second = (training_runs.whole_tensors(tmp_path / name) for name in ("step-2", "loaded-2"))
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert torch.equal(value, second[key]), key
