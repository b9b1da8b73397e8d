"""The memory estimate under layouts of two ranks, against the tensors of the larger one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.step_memory import measured, measured_zero, stage

from megatron_palimpsa.training import memory
from megatron_palimpsa.training.memory import estimate_memory


def _zero(stage: int) -> dict[str, Any]:
    return {"engine": "deepspeed", "deepspeed": {"zero_stage": stage, "reduce_bucket_size": 100_000}}


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"parallel": {"tp": 2}},
    "tp, sequence parallel": {"parallel": {"tp": 2, "sequence_parallel": True}},
    "tp, selective": {"parallel": {"tp": 2, "sequence_parallel": True}, "train": {"recompute": "selective"}},
    "cp": {"parallel": {"cp": 2}},
    "dp": {"train": {"global_batch_tokens": 2048}},
    "pp": {"parallel": {"pp": 2}, "train": {"global_batch_tokens": 4096}},
    "vpp": {"parallel": {"pp": 2, "vpp": 2}, "train": {"global_batch_tokens": 4096}},
    "zero 1": {"train": {"global_batch_tokens": 4096}, "parallel": _zero(1)},
    "zero 2": {"train": {"global_batch_tokens": 4096}, "parallel": _zero(2)},
    "zero 3": {"train": {"global_batch_tokens": 4096}, "parallel": _zero(3)},
    "pp, full": {"parallel": {"pp": 2}, "train": {"global_batch_tokens": 4096, "recompute": "full"}},
}


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="counts without a GPU what would be there")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_estimate_is_what_the_larger_rank_holds(two_processes, monkeypatch, layout):
    monkeypatch.setattr(memory, "WORKSPACE_BYTES", 0)
    config = stage(LAYOUTS[layout], world_size=2)
    estimate = estimate_memory(config, 2 // config.parallel.replica_size)
    if config.parallel.engine == "deepspeed":
        pytest.importorskip("deepspeed")
        peaks = [peak for peak, _, _ in two_processes.run(measured_zero, config)]
    else:
        peaks = [peak for _, peak in two_processes.run(measured, config)]
    assert estimate.total == pytest.approx(max(peaks), rel=0.06)
