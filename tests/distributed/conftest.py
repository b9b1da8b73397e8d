"""Four processes kept over all tests of the session, and one-process runs to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from helpers import training_runs
from helpers.training_runs import Run
from helpers.workers import FirstWorkers, Workers

from megatron_palimpsa import parallel
from megatron_palimpsa.config import StageConfig


@pytest.fixture(scope="session")
def four_processes() -> Iterator[Workers]:
    workers = Workers(4)
    yield workers
    workers.close()


@pytest.fixture
def two_processes(four_processes: Workers) -> FirstWorkers:
    return FirstWorkers(four_processes, 2)


@pytest.fixture(scope="session")
def one_process_run() -> Callable[[StageConfig, int], Run]:
    """Trains in this process without any parallelism; equal models are trained once."""
    known: dict[tuple[str, int], Run] = {}

    def run(config: StageConfig, steps: int) -> Run:
        key = (repr(config), steps)
        if key not in known:
            try:
                known[key] = training_runs.train(config, steps)
            finally:
                parallel.destroy()
        return known[key]

    return run
