"""Going on in a new process equals never having stopped."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import training_runs
from helpers.stages import tiny_stage
from helpers.training_runs import Resumed
from helpers.workers import Workers
from megatron.core import parallel_state


@pytest.fixture(scope="module")
def new_process() -> Iterator[Workers]:
    workers = Workers(1)
    yield workers
    workers.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_six_steps_equal_three_and_three(precision: str, new_process: Workers, tmp_path: Path) -> None:
    config = tiny_stage(train={"precision": precision, "tokens": 64 * 8}, optimizer={"schedule": "linear"})
    parallel_state.destroy_model_parallel()
    unbroken: Resumed = training_runs.train_and_save(config, 3, 3, tmp_path)
    # Steps in the checkpoint were run here, the rest there: once from step 3, and again from that run's own save.
    [once] = new_process.run(training_runs.load_and_train, config, 3, 1, tmp_path, True)
    [twice] = new_process.run(training_runs.load_and_train, config, 4, 2, tmp_path, False)
    assert once.steps + twice.steps == unbroken.steps
    assert once.learning_rates + twice.learning_rates == unbroken.learning_rates
    assert len(set(unbroken.learning_rates)) == 3
    assert twice.state.keys() == unbroken.state.keys()
    for name, value in unbroken.state.items():
        assert torch.equal(value, twice.state[name]), name
