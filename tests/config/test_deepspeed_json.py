import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.stages import TINY

from megatron_palimpsa.config import ConfigError, StageConfig, load_stage, save_resolved

READY: dict[str, Any] = {
    "train_batch_size": 2,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 0.5,
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 128},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.8, 0.99], "eps": "auto", "torch_adam": True}},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": 5e7,
        "stage3_prefetch_bucket_size": "auto",
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "offload_param": {"device": "none", "pin_memory": True},
        "zero_quantized_weights": False,
    },
}


def stage_with(folder: Path, ready: Any, *overrides: str, **parallel: Any) -> StageConfig:
    text = ready if isinstance(ready, str) else json.dumps(ready)
    (folder / "ready.json").write_text(text)
    tree = {key: value for key, value in TINY.items() if key != "train"}
    tree["train"] = {"tokens": 640, "global_batch_tokens": "64"}
    tree["parallel"] = {"engine": "deepspeed", "deepspeed": {"config": "ready.json", **parallel}}
    (folder / "stage.yaml").write_text(yaml.safe_dump(tree))
    return load_stage(folder / "stage.yaml", list(overrides))


def refusal(folder: Path, ready: Any, *overrides: str, **parallel: Any) -> str:
    with pytest.raises(ConfigError) as error:
        stage_with(folder, ready, *overrides, **parallel)
    return str(error.value)


def test_what_the_stage_leaves_open_is_taken_from_the_json(tmp_path: Path) -> None:
    config = stage_with(tmp_path, READY)
    zero = config.parallel.deepspeed
    assert (zero.zero_stage, zero.overlap_comm, zero.reduce_bucket_size) == (3, True, 50_000_000)
    assert (zero.offload_optimizer, zero.offload_parameters, zero.pin_memory) == (True, False, False)
    assert zero.stage3_prefetch_bucket_size == 50_000_000
    assert zero.fp16.loss_scale == 0
    assert zero.gradient_accumulation_steps is None
    assert (config.optimizer.clip_grad, config.optimizer.beta1, config.optimizer.beta2) == (0.5, 0.8, 0.99)
    assert config.train.precision == "bf16"


def test_the_resolved_stage_needs_the_json_no_more(tmp_path: Path) -> None:
    config = stage_with(tmp_path, READY)
    save_resolved(config, tmp_path / "resolved.yaml")
    (tmp_path / "ready.json").unlink()
    assert load_stage(tmp_path / "resolved.yaml") == config


def test_the_path_is_relative_to_the_file_that_names_it_and_to_the_working_folder_in_an_override(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage_with(tmp_path, READY)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "other.yaml").write_text("base: ../stage.yaml\n")
    assert load_stage(tmp_path / "below" / "other.yaml").parallel.deepspeed.zero_stage == 3
    (tmp_path / "below" / "two.json").write_text('{"zero_optimization": {"stage": 2}}')
    monkeypatch.chdir(tmp_path / "below")
    assert load_stage("other.yaml", ["parallel.deepspeed.config=two.json"]).parallel.deepspeed.zero_stage == 2


def test_fp16_and_its_scale(tmp_path: Path) -> None:
    config = stage_with(tmp_path, {"fp16": {"enabled": True, "loss_scale": 128, "hysteresis": 1}})
    assert config.train.precision == "fp16"
    assert (config.parallel.deepspeed.fp16.loss_scale, config.parallel.deepspeed.fp16.hysteresis) == (128, 1)


@pytest.mark.parametrize(
    ("ready", "overrides", "expected"),
    [
        ({"zero_optimization": {"stage": 3}}, ["parallel.deepspeed.zero_stage=2"],
         ["zero_optimization.stage=3 contradicts parallel.deepspeed.zero_stage=2"]),
        ({"train_batch_size": 4}, [],
         ["train_batch_size=4 times model.seq_length=32 contradicts train.global_batch_tokens=64"]),
        ({"train_micro_batch_size_per_gpu": 2}, ["train.micro_batch_size=1"],
         ["train_micro_batch_size_per_gpu=2 contradicts train.micro_batch_size=1"]),
        ({"gradient_clipping": 0.5}, ["optimizer.clip_grad=1.0"],
         ["gradient_clipping=0.5 contradicts optimizer.clip_grad=1.0"]),
        ({"bf16": {"enabled": True}}, ["train.precision=fp32"], ["bf16.enabled", "train.precision=fp32"]),
        ({"bf16": {"enabled": False}}, [], ["bf16.enabled=false", "train.precision=bf16"]),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, [], ["fp16.enabled=true contradicts"]),
        ({"optimizer": {"params": {"lr": 0.5}}}, [], ["optimizer.params.lr=0.5 contradicts optimizer.lr=0.01"]),
        ({"optimizer": {"params": {"betas": [0.5]}}}, [], ["optimizer.params.betas=[0.5] must be two numbers"]),
        ({"optimizer": {"type": "Lion"}}, [], ["optimizer.type=Lion", "AdamW"]),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, [], ["adam_w_mode=false", "true"]),
        ({"scheduler": {"type": "WarmupLR"}}, [], ["scheduler", "optimizer.schedule"]),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, [], ["offload_param.device=nvme", "cpu"]),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
         ["parallel.deepspeed.offload_optimizer=false"],
         ["offload_optimizer.device=cpu contradicts parallel.deepspeed.offload_optimizer=false"]),
        ({"zero_optimization": {"zero_quantized_weights": True}}, [],
         ["zero_quantized_weights=true is not supported", "zero_hpz_partition_size"]),
        ({"zero_optimization": {"mics_shard_size": 8}}, [], ["mics_shard_size=8", "removed MiCS"]),
        ({"zero_optimization": {"stagee": 3}}, [], ["'zero_optimization.stagee'", "remove it"]),
        ({"fp16": {"enabled": False, "scale": 3}}, [], ["'fp16.scale'"]),
        ({"flops_profiler": {"enabled": True}}, [], ["'flops_profiler'"]),
        ({"communication_data_type": "bf16"}, [], ["communication_data_type=bf16", "fp32"]),
        ({"bf16": {"enabled": 1}}, [], ["bf16.enabled=1 is not supported; set it to true or false"]),
        ({"zero_optimization": {"reduce_bucket_size": "many"}}, [], ["reduce_bucket_size='many'"]),
        ('{"bf16": {}, "bf16": {}}', [], ["'bf16' is given twice"]),
        ("[1]", [], ["expected a mapping, found list"]),
        ("{", [], ["parallel.deepspeed.config", "ready.json"]),
        ({}, ["parallel.deepspeed.config=none-there.json"], ["cannot read", "none-there.json"]),
        ({}, ["parallel.deepspeed.config=7"], ["config=7 must be the path"]),
        ({}, ["parallel.deepspeed.zero_quantized_gradients=true"],
         ["parallel.deepspeed.zero_quantized_gradients is not supported"]),
    ],
)  # fmt: skip
def test_contradictions_and_unknown_keys_are_refused_by_name(
    ready: Any, overrides: list[str], expected: list[str], tmp_path: Path
) -> None:
    message = refusal(tmp_path, ready, *overrides)
    for part in expected:
        assert part in message
