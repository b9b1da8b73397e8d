"""One small stage with random weights for all tests of evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.random_stage import write_random_stage

from megatron_palimpsa.inference import Opened, opened


@pytest.fixture(scope="session")
def evaluated_stage(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    return write_random_stage(tmp_path_factory.mktemp("evaluated"), tiny_data)


@pytest.fixture(scope="module")
def it(evaluated_stage: Path) -> Iterator[Opened]:
    with opened(evaluated_stage) as found:
        yield found
