"""One process with Megatron's parallel state for each module of engine tests."""

from collections.abc import Iterator

import pytest

from megatron_palimpsa import parallel
from megatron_palimpsa.config import ParallelConfig


@pytest.fixture(scope="module", autouse=True)
def single_process() -> Iterator[None]:
    parallel.initialize(ParallelConfig(), seed=1)
    yield
    parallel.destroy()
