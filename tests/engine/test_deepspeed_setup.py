"""What DeepSpeed is given."""

from __future__ import annotations

import sys

import pytest
import torch
from helpers.stages import tiny_stage

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.engine.assembly import build_chunks
from megatron_palimpsa.engine.deepspeed_setup import build_adamw, deepspeed_config, mixed_dtypes
from megatron_palimpsa.engine.installed import require_engine
from megatron_palimpsa.parallel.cpu import cuda_means_cpu


def test_without_deepspeed_the_message_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    require_engine(tiny_stage())
    with pytest.raises(ConfigError, match=r"DS_BUILD_OPS=0 \.venv/bin/pip install"):
        require_engine(tiny_stage(parallel={"engine": "deepspeed"}))


def test_settings_arrive_under_names_that_deepspeed_takes():
    zero = pytest.importorskip("deepspeed.runtime.zero.config")
    sizes = {
        "reduce_bucket_size": 12,
        "allgather_bucket_size": 14,
        "sub_group_size": 16,
        "stage3_prefetch_bucket_size": 18,
        "stage3_param_persistence_threshold": 20,
        "stage3_max_live_parameters": 22,
        "stage3_max_reuse_distance": 24,
        "overlap_comm": True,
        "zero_hpz_partition_size": 2,
    }
    place = {"offload_optimizer": True, "offload_parameters": True, "pin_memory": False}
    deepspeed = {"zero_stage": 3, **sizes, **place}
    given = deepspeed_config(tiny_stage(2, parallel={"engine": "deepspeed", "deepspeed": deepspeed}))
    taken = zero.DeepSpeedZeroConfig(**given["zero_optimization"])
    assert taken.stage == 3
    assert {key: getattr(taken, key.removeprefix("stage3_")) for key in sizes} == sizes
    for offload in (taken.offload_optimizer, taken.offload_param):
        assert (offload.device, offload.pin_memory) == ("cpu", False)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_groups_have_one_dtype_and_decay_what_the_model_marks(precision):
    config = tiny_stage(train={"precision": precision})
    with cuda_means_cpu():
        [model] = build_chunks(config)
    adamw = build_adamw(model.parameters(), config)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decay = {}
    for group in adamw.param_groups:
        assert len({parameter.dtype for parameter in group["params"]}) == 1
        decay |= {names[id(parameter)]: group["wd_mult"] for parameter in group["params"]}
    assert decay == {
        name: 0.0 if getattr(parameter, "no_weight_decay", False) else 1.0
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert set(decay.values()) == {0.0, 1.0}


def test_partitions_of_two_dtypes_lie_in_two_buffers():
    deepspeed = pytest.importorskip("deepspeed")
    tensors = [
        torch.full((size,), float(size), dtype=dtype)
        for size, dtype in ((3, torch.bfloat16), (2, torch.bfloat16), (4, torch.float32))
    ]
    with mixed_dtypes(deepspeed):
        buffers = deepspeed.runtime.zero.stage3.defragment(tensors)
    assert buffers.narrow(0, 0, 5).tolist() == [3.0] * 3 + [2.0] * 2
    assert buffers.narrow(0, 5, 4).dtype == torch.float32
    assert tensors[2].data_ptr() == buffers.narrow(0, 5, 4).data_ptr()
    with pytest.raises(IndexError):
        buffers.narrow(0, 9, 1)
