"""Every layout of two ranks computes what one GPU does, over NCCL, in fp32 and bf16.

Runs by itself on a machine without the rest of the project's dependencies:

    PYTHONPATH=.:kernels:tests python -m pytest --noconftest -c /dev/null -vs tests/distributed/test_gpu_layouts.py

`-s` shows how far each layout was off.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers import training_runs
from helpers.covering import covering_subset
from helpers.layout_table import LEGAL, STEPS, Layout, stage
from helpers.same_function import BF16_GPU, FP32, assert_same_function
from helpers.training_runs import Run
from helpers.workers import Workers

from megatron_palimpsa.config import StageConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

MODEL = {
    "hidden_size": 128,
    "seq_length": 256,
    "d_state": 32,
    "headdim": 32,
    "beta_rank": 16,
    "ffn_hidden_size": 256,
    "init_std": 0.08,
}
BOUNDS = {"fp32": FP32, "bf16": BF16_GPU}
LAYOUTS = [
    Layout(*row) for row in covering_subset([layout for layout in LEGAL if layout.ranks == 2], cost=lambda row: 1.0)
]


def gpu_stage(layout: Layout, precision: str) -> StageConfig:
    return stage(layout, model=MODEL, train={"precision": precision, "global_batch_tokens": 1024, "tokens": 102400})


@pytest.fixture(scope="module")
def two_gpus() -> Iterator[Workers]:
    workers = Workers(2)
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def one_gpu_runs() -> dict[StageConfig, Run]:
    return {}


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_two_gpus_compute_what_one_does(
    layout: Layout, precision: str, two_gpus: Workers, one_gpu_runs: dict[StageConfig, Run]
) -> None:
    alone = gpu_stage(layout.one_process, precision)
    if alone not in one_gpu_runs:
        [one_gpu_runs[alone]] = two_gpus.run_on(1, training_runs.train, alone, STEPS)
    expected = one_gpu_runs[alone]
    runs = two_gpus.run(training_runs.train, gpu_stage(layout, precision), STEPS)
    assert_same_function(runs, expected, layout.tp, BOUNDS[precision])
