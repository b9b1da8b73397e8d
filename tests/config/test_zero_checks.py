from typing import Any

import pytest
from helpers.stages import tiny_stage

from megatron_palimpsa.config import ConfigError, DeepSpeedConfig


def refusal(world_size: int, train: dict[str, Any], **parallel: Any) -> str:
    with pytest.raises(ConfigError) as error:
        tiny_stage(world_size, train=train, parallel=parallel)
    return str(error.value)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"zero_stage": 4}, "parallel.deepspeed.zero_stage"),
        ({"zero_stage": 1, "overlap_comm": True}, "overlap_comm=true with parallel.deepspeed.zero_stage=1"),
        ({"zero_stage": 0, "offload_optimizer": True}, "offload_optimizer=true with parallel.deepspeed.zero_stage=0"),
        ({"zero_stage": 2, "offload_optimizer": True, "offload_parameters": True}, "offload_parameters=true needs"),
        ({"zero_stage": 3, "offload_parameters": True}, "offload_parameters=true needs"),
        ({"zero_stage": 2, "stage3_max_live_parameters": 7}, "stage3_max_live_parameters=7"),
        ({"zero_stage": 1, "sub_group_size": 7}, "sub_group_size=7"),
        ({"zero_stage": 1, "zero_hpz_partition_size": 2}, "zero_hpz_partition_size=2 with"),
        ({"zero_stage": 3, "zero_hpz_partition_size": 2}, "zero_hpz_partition_size=2 does not divide the 1"),
        ({"allgather_bucket_size": 7}, "allgather_bucket_size=7 must be even"),
        ({"reduce_bucket_size": 0}, "reduce_bucket_size=0"),
        ({"fp16": {"hysteresis": 1}}, "parallel.deepspeed.fp16 holds settings, but train.precision is fp32"),
        ({"gradient_accumulation_steps": 3}, "gives each of 1 data-parallel ranks 2 microbatches"),
        ({"offload": True}, "unknown key 'parallel.deepspeed.offload'"),
    ],
)
def test_settings_that_cannot_run_are_refused_by_name(settings: dict[str, Any], expected: str) -> None:
    assert expected in refusal(1, {}, engine="deepspeed", deepspeed=settings)


def test_the_megatron_engine_takes_no_settings_of_deepspeed_and_no_fp16() -> None:
    assert "set it to deepspeed" in refusal(1, {}, deepspeed={"zero_stage": 3})
    assert "scales no loss" in refusal(1, {"precision": "fp16"})


def test_norms_that_run_again_need_their_weights_whole() -> None:
    layout: dict[str, Any] = {"engine": "deepspeed"}
    zero = {"zero_stage": 3, "stage3_param_persistence_threshold": 63}
    # Of 64 channels behind the scan.
    assert "set it to 64 or more" in refusal(1, {"recompute": "selective"}, **layout, deepspeed=zero)
    for recompute, threshold in (("selective", 64), ("full", 63)):
        zero["stage3_param_persistence_threshold"] = threshold
        tiny_stage(1, train={"recompute": recompute}, parallel={**layout, "deepspeed": zero})


@pytest.mark.parametrize("stage", [2, 3])
def test_a_pipeline_goes_with_stages_0_and_1_only(stage: int) -> None:
    layout: dict[str, Any] = {"pp": 2, "engine": "deepspeed"}
    model = {"pattern": "M|P"}
    for fine in (0, 1):
        tiny_stage(2, model=model, parallel={**layout, "deepspeed": {"zero_stage": fine}})
    with pytest.raises(ConfigError, match=f"zero_stage={stage}: gradients that are spread while a pipeline runs"):
        tiny_stage(2, model=model, parallel={**layout, "deepspeed": {"zero_stage": stage}})


def test_model_chunks_are_the_megatron_engines() -> None:
    layout: dict[str, Any] = {"pp": 2, "vpp": 2, "engine": "deepspeed"}
    with pytest.raises(ConfigError, match=r"parallel\.vpp=2 with parallel\.engine=deepspeed"):
        tiny_stage(2, model={"pattern": "M|P|*|-"}, parallel=layout)


def test_the_names_are_deepspeeds() -> None:
    zero = pytest.importorskip("deepspeed.runtime.zero.config")
    fields = {field.alias or name for name, field in zero.DeepSpeedZeroConfig.model_fields.items()}
    ours = {
        "zero_stage",
        "offload_optimizer",
        "offload_parameters",
        "pin_memory",
        "gradient_accumulation_steps",
        "fp16",
    }
    assert DeepSpeedConfig.__dataclass_fields__.keys() - ours <= fields
