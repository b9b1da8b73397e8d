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

# Slow decay: what the scan reads out is not small beside D v, whose length the norm over a head does not see.
PALIMPSA_D = {"a_min": 0.1, "a_max": 1.0}

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
    ("layout", "changes"),
    [
        (Layout(tp=2, sequence_parallel=True), {"train": {"recompute": "full"}}),
        (
            Layout(dp=2, distributed_optimizer=True, ngroups=2),
            {"train": {"micro_batch_size": 2, "global_batch_tokens": 256}},
        ),
        (
            Layout(tp=2, dp=2, sequence_parallel=True, distributed_optimizer=True),
            {"model": {"pattern": "QL*-"} | PALIMPSA_D},
        ),
        (
            Layout(tp=2, pipeline=Pipeline(2, 1)),
            {"model": {"pattern": "Q-|L"} | PALIMPSA_D, "train": {"recompute": "selective"}},
        ),
    ],
    ids=["recomputation", "two sequences a microbatch", "Palimpsa-D", "Palimpsa-D in a pipeline"],
)
def test_so_it_does_with(
    layout: Layout, changes: dict[str, Any], four_processes: Workers, one_process_run: OneProcessRun
) -> None:
    runs = four_processes.run_on(layout.ranks, training_runs.train, stage(layout, **changes), STEPS)
    expected = one_process_run(stage(layout.one_process, **changes), STEPS)
    assert_same_function(runs, expected, layout.tp, FP32)


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        (Layout(tp=2, cp=2), {}),
        (Layout(tp=2, sequence_parallel=True, dp=2, distributed_optimizer=True, ngroups=2), {}),
        pytest.param(Layout(tp=4, sequence_parallel=True, ngroups=2, tied=False), {}, marks=pytest.mark.long),
        (Layout(tp=2, sequence_parallel=True, pipeline=Pipeline(2, 2)), {}),
        (Layout(tp=2, sequence_parallel=True), {"pattern": "QL"}),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else value.get("pattern", ""),
)
def test_copies_are_equal_after_twenty_steps(layout: Layout, model: dict[str, Any], four_processes: Workers) -> None:
    """Copies whose gradients differ drift apart under Adam; a rate at which weights move far shows it."""
    config = stage(layout, model=model, train={"global_batch_tokens": 64}, optimizer={"lr": 1e-2})
    runs: list[Run] = four_processes.run_on(layout.ranks, training_runs.train, config, 20)
    assert [step.applied for step in runs[0].steps] == [True] * 20
    copied = {name for run in runs for name, share in run.weights.items() if share.split_dim is None}
    kinds = ["mixer.beta_down_weight", "layers.0.norm.weight", "final_norm.weight"]
    if "Q" in config.model.layers:
        kinds += ["mixer.norm.weight"]
    elif layout.ngroups % layout.tp:
        kinds += ["mixer.B_weight", "mixer.conv_C_bias"]
    for kind in kinds:
        assert any(name.endswith(kind) for name in copied), kind
    # Bitwise equality is asserted while putting the shares together.
    unsplit([run.weights for run in runs], layout.tp)
