"""Every layout computes the same function as one process: a table of configurations on up to four processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers import training_runs
from helpers.layout_table import COVERING, LEGAL, STEPS, Layout, Pipeline, stage
from helpers.same_function import FP32, assert_same_function
from helpers.training_runs import Run, unsplit
from helpers.workers import Workers

from megatron_palimpsa.config import StageConfig

OneProcessRun = Callable[[StageConfig, int], Run]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=layout.name, marks=() if layout in COVERING else pytest.mark.long)
        for layout in sorted(LEGAL, key=lambda layout: layout not in COVERING)
    ],
)
def test_layout_computes_what_one_process_does(
    layout: Layout, four_processes: Workers, one_process_run: OneProcessRun
) -> None:
    runs = four_processes.run_on(layout.ranks, training_runs.train, stage(layout), STEPS)
    expected = one_process_run(stage(layout.one_process), STEPS)
    assert_same_function(runs, expected, layout.tp, FP32)


@pytest.mark.parametrize(
    ("layout", "train"),
    [
        (Layout(tp=2, sequence_parallel=True), {"recompute": "full"}),
        (Layout(dp=2, distributed_optimizer=True, ngroups=2), {"micro_batch_size": 2, "global_batch_tokens": 256}),
    ],
    ids=["recomputation", "two sequences a microbatch"],
)
def test_so_it_does_with(
    layout: Layout, train: dict[str, Any], four_processes: Workers, one_process_run: OneProcessRun
) -> None:
    runs = four_processes.run_on(layout.ranks, training_runs.train, stage(layout, train=train), STEPS)
    expected = one_process_run(stage(layout.one_process, train=train), STEPS)
    assert_same_function(runs, expected, layout.tp, FP32)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, cp=2),
        Layout(tp=2, sequence_parallel=True, dp=2, distributed_optimizer=True, ngroups=2),
        Layout(tp=4, sequence_parallel=True, ngroups=2, tied=False),
        Layout(tp=2, sequence_parallel=True, pipeline=Pipeline(2, 2)),
    ],
    ids=lambda layout: layout.name,
)
def test_copies_are_equal_after_twenty_steps(layout: Layout, four_processes: Workers) -> None:
    """Copies whose gradients differ drift apart under Adam; a rate at which weights move far shows it."""
    config = stage(layout, train={"global_batch_tokens": 64}, optimizer={"lr": 1e-2})
    runs: list[Run] = four_processes.run_on(layout.ranks, training_runs.train, config, 20)
    assert [step.applied for step in runs[0].steps] == [True] * 20
    copied = {name for run in runs for name, share in run.weights.items() if share.split_dim is None}
    kinds = ["mixer.beta_down_weight", "layers.0.norm.weight", "final_norm.weight"]
    if layout.ngroups % layout.tp:
        kinds += ["mixer.B_weight", "mixer.conv_C_bias"]
    for kind in kinds:
        assert any(name.endswith(kind) for name in copied), kind
    # Bitwise equality is asserted while putting the shares together.
    unsplit([run.weights for run in runs], layout.tp)
