"""Megatron's parallel state of one process, for each module of tests that imports the fixture."""

from collections.abc import Iterator

import pytest

from megatron_palimpsa import parallel
from megatron_palimpsa.config import ParallelConfig


@pytest.fixture(scope="module", autouse=True)
def single_process() -> Iterator[None]:
    parallel.initialize(ParallelConfig(), seed=1)
    yield
    parallel.destroy()
