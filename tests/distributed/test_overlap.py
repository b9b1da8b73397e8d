"""Reducing gradients and gathering weights beside the computation, against doing it before and after."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import training_runs
from helpers.stages import tiny_stage
from helpers.training_runs import Run
from helpers.workers import Workers
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.engine import assembly

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {"distributed_optimizer": False}),
    "dp2-distributed": (2, {}),
    "tp2-dp2-distributed": (4, {"tp": 2, "sequence_parallel": True}),
    "pp2-vpp2-dp2-distributed": (4, {"pp": 2, "vpp": 2}),
}


def train(config: StageConfig, overlap: bool) -> tuple[Run, int]:
    """A run with buckets of few parameters or with all overlap taken out; and how many reductions came early."""
    decide, finish = assembly.data_parallelism, _ParamAndGradBucketGroup.finish_grad_sync
    early = 0

    def few_parameters_a_bucket(config: StageConfig) -> Any:
        return replace(decide(config), bucket_size=2000)

    def one_after_the_other(config: StageConfig) -> Any:
        off = {"overlap_grad_reduce": False, "overlap_param_gather": False, "align_param_gather": False}
        return replace(decide(config), **off)

    def counting(self: Any, *arguments: Any, **options: Any) -> None:
        nonlocal early
        early += self.grad_reduce_handle is not None
        finish(self, *arguments, **options)

    assembly.data_parallelism = few_parameters_a_bucket if overlap else one_after_the_other
    _ParamAndGradBucketGroup.finish_grad_sync = counting
    try:
        return training_runs.train(config, 4), early
    finally:
        assembly.data_parallelism = decide
        _ParamAndGradBucketGroup.finish_grad_sync = finish


@pytest.mark.parametrize("layout", LAYOUTS)
def test_overlap_changes_no_bit(layout: str, four_processes: Workers) -> None:
    size, parallel = LAYOUTS[layout]
    config = tiny_stage(
        size,
        model={"pattern": "MP|P*|-|P" if "vpp" in parallel else "MP*-P"},
        train={"global_batch_tokens": 256, "tokens": 25600, "precision": "bf16"},
        optimizer={"lr": 1e-3},
        parallel=parallel,
    )
    runs = [four_processes.run_on(size, train, config, overlap) for overlap in (True, False)]
    for (run, early), (expected, none_early) in zip(*runs, strict=True):
        assert early > 4
        assert none_early == 0
        assert run.steps == expected.steps
        assert torch.equal(run.evaluation, expected.evaluation)
        for name, share in run.weights.items():
            assert torch.equal(share.value, expected.weights[name].value), name
