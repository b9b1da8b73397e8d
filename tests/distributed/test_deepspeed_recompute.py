"""Recomputation under ZeRO-3, which gives weights up between their passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers import training_runs
from helpers.layout_table import Layout, stage
from helpers.same_function import FP32, assert_same_function
from helpers.training_runs import Run
from helpers.workers import FirstWorkers
from helpers.zero_stages import zero_stage

from megatron_palimpsa.config import StageConfig

pytest.importorskip("deepspeed")

STEPS = 2
NORMS_ARE_WHOLE = {"stage3_param_persistence_threshold": 64}
"""And nothing larger."""


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(tp=2, sequence_parallel=True, tied=False)], ids=["dp2", "tp2"])
def test_what_runs_again_finds_its_weights(
    layout: Layout,
    recompute: str,
    two_processes: FirstWorkers,
    one_process_run: Callable[[StageConfig, int], Run],
) -> None:
    config = zero_stage(layout, 3, NORMS_ARE_WHOLE, train={"recompute": recompute})
    runs = two_processes.run(training_runs.train, config, STEPS)
    assert_same_function(runs, one_process_run(stage(layout.one_process), STEPS), layout.tp, FP32)
