"""The same model under tensor, sequence and pipeline parallelism: function, gradients, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import layouts
from helpers.workers import Workers

from megatron_palimpsa.model import build_model
from megatron_palimpsa.model.naming import global_parameters


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Workers]:
    workers = Workers(2)
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, single_process) -> Path:
    """What one process computes and saves, by geometry."""
    folder = tmp_path_factory.mktemp("layouts")
    for geometry in layouts.GEOMETRIES:
        layouts.single_process_results(folder, geometry)
    return folder


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("geometry", layouts.GEOMETRIES)
def test_two_ranks_compute_what_one_does(two_ranks, folder, geometry, sequence_parallel):
    two_ranks.run(layouts.compare_tensor_parallel, folder, geometry, sequence_parallel)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}])
@pytest.mark.parametrize(
    "geometry", ["one group", "a group a rank", "a head's own keys", "a group cut by the ranks' border"]
)
def test_checkpoints_go_from_one_process_to_two_and_back(two_ranks, folder, geometry, layout):
    two_ranks.run(layouts.exchange_checkpoints, folder, geometry, layout, str(layout))
    model = build_model(layouts.stage(geometry))
    layouts.load_checkpoint(model, folder / str(layout) / geometry)
    expected = torch.load(folder / f"{geometry}.pt", weights_only=True)["weights"]
    for name, parameter in global_parameters(model):
        assert torch.equal(parameter, expected[name]), name
