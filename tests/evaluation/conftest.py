"""One small stage with random weights for all tests of evaluation, and what lm-evaluation-harness needs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from helpers.hub_data import write_hub_data
from helpers.own_tasks import write_own_data, write_own_tasks
from helpers.random_stage import write_random_stage

from megatron_palimpsa.inference import Opened, opened


@pytest.fixture(scope="session")
def evaluated_stage(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    return write_random_stage(tmp_path_factory.mktemp("evaluated"), tiny_data)


@pytest.fixture(scope="module")
def it(evaluated_stage: Path) -> Iterator[Opened]:
    with opened(evaluated_stage) as found:
        yield found


@pytest.fixture(scope="session")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The adapter, with the data sets' cache in a folder of its own and no hub."""
    import datasets.config

    patch = pytest.MonkeyPatch()
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    yield importlib.import_module("megatron_palimpsa.evaluation.harness")
    patch.undo()


@pytest.fixture(scope="session")
def harness_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets of the paper's tasks and one of our own."""
    folder = write_hub_data(tmp_path_factory.mktemp("data"))
    write_own_data(folder)
    return folder


@pytest.fixture(scope="session")
def include(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_own_tasks(tmp_path_factory.mktemp("include"))
