"""Interleaved 1F1B on two pipeline ranks of two uneven chunks each, against one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers import layout_table, training_runs
from helpers.layout_table import Layout, Pipeline
from helpers.same_function import FP32, assert_same_function
from helpers.stages import random_batch
from helpers.training_runs import Run
from helpers.workers import Workers

from megatron_palimpsa import parallel
from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.engine.megatron import MegatronEngine
from megatron_palimpsa.training.validation import Validation, validate

PATTERN = {"pattern": "M|P*|-|P"}
LAYOUT = Layout(pipeline=Pipeline(2, 2))
INTERLEAVED, ALONE = (layout_table.stage(layout, model=PATTERN) for layout in (LAYOUT, LAYOUT.one_process))


def validated(config: StageConfig) -> Validation:
    with training_runs.layout(config):
        return validate(MegatronEngine(config), [random_batch(config, seed) for seed in range(3)])


def test_uneven_chunks_equal_one_process(
    two_processes: Workers, one_process_run: Callable[[StageConfig, int], Run]
) -> None:
    runs = two_processes.run(training_runs.train, INTERLEAVED, 2)
    assert_same_function(runs, one_process_run(ALONE, 2), 1, FP32)
    # Every layer is on one rank, under its name in the unsplit model.
    held = [{name.split(".")[2] for name in run.weights if "layers" in name} for run in runs]
    assert not held[0] & held[1]


def test_validation_sees_every_layer(two_processes: Workers) -> None:
    try:
        expected = validated(ALONE)
    finally:
        parallel.destroy()
    for found in two_processes.run(validated, INTERLEAVED):
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        assert list(found.memory) == ["1", "2", "5"]
        for layer, statistics in expected.memory.items():
            assert found.memory[layer] == pytest.approx(statistics, rel=1e-4)
