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
         ["zero_optimization.stage=3 contradicts the stage's parallel.deepspeed.zero_stage=2"]),
        ({"train_batch_size": 4}, [],
         ["train_batch_size=4 times model.seq_length=32 contradicts the stage's train.global_batch_tokens='64'"]),
        ({"train_micro_batch_size_per_gpu": 2}, ["train.micro_batch_size=1"],
         ["train_micro_batch_size_per_gpu=2 contradicts the stage's train.micro_batch_size=1"]),
        ({"gradient_clipping": 0.5}, ["optimizer.clip_grad=1.0"],
         ["gradient_clipping=0.5 contradicts the stage's optimizer.clip_grad=1.0"]),
        ({"bf16": {"enabled": True}}, ["train.precision=fp32"],
         ["bf16.enabled=true contradicts the stage's train.precision='fp32'"]),
        ({"bf16": {"enabled": False}}, [], ["bf16.enabled=false", "train.precision=bf16"]),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, [], ["fp16.enabled=true contradicts"]),
        ({"optimizer": {"params": {"lr": 0.5}}}, [],
         ["optimizer.params.lr=0.5 contradicts the stage's optimizer.lr=0.01"]),
        ({"optimizer": {"params": {"betas": [0.5]}}}, [], ["optimizer.params.betas=[0.5] must be two numbers"]),
        ({"optimizer": {"type": "Lion"}}, [], ["optimizer.type='Lion'", "AdamW"]),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, [], ["adam_w_mode=false", "true"]),
        ({"scheduler": {"type": "WarmupLR"}}, [], ["scheduler", "optimizer.schedule"]),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, [], ["offload_param.device='nvme'", "cpu"]),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
         ["parallel.deepspeed.offload_optimizer=false"],
         ["offload_optimizer.device='cpu' contradicts the stage's parallel.deepspeed.offload_optimizer=false"]),
        ({"zero_optimization": {"zero_quantized_weights": True}}, [],
         ["zero_quantized_weights=true is not supported", "zero_hpz_partition_size"]),
        ({"zero_optimization": {"mics_shard_size": 8}}, [], ["mics_shard_size=8", "removed MiCS"]),
        ({"zero_optimization": {"stagee": 3}}, [], ["'zero_optimization.stagee'", "remove it"]),
        ({"fp16": {"enabled": False, "scale": 3}}, [], ["'fp16.scale'"]),
        ({"flops_profiler": {"enabled": True}}, [], ["'flops_profiler'"]),
        ({"communication_data_type": "bf16"}, [], ["communication_data_type='bf16'", "fp32"]),
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


@pytest.mark.parametrize(
    ("ready", "expected"),
    [
        ({"train_batch_size": "many"}, "train_batch_size='many' must be a whole number above 0"),
        ({"train_batch_size": "8"}, "train_batch_size='8' must be"),
        ({"train_batch_size": True}, "train_batch_size=true must be"),
        ({"train_batch_size": 2.5}, "train_batch_size=2.5 must be"),
        ({"train_batch_size": -2}, "train_batch_size=-2 must be"),
        ({"train_batch_size": {}}, "train_batch_size={} must be"),
        ({"train_batch_size": 2**62}, f"train_batch_size={2**62} times model.seq_length=32: Input should be less"),
        ({"zero_optimization": {"stage": "2"}}, "zero_optimization.stage='2': Input should be a valid integer"),
        ({"zero_optimization": {"stage": 7}}, "zero_optimization.stage=7: Input should be less than or equal to 3"),
        ({"zero_optimization": {"stage": {"of": 1}}}, "zero_optimization.stage={'of': 1}: Input should be a valid int"),
        ({"zero_optimization": {"overlap_comm": 1}}, "zero_optimization.overlap_comm=1: Input should be a valid bool"),
        ({"zero_optimization": {"reduce_bucket_size": "many"}},
         "zero_optimization.reduce_bucket_size='many': Value error, expected a count"),
        ({"train_micro_batch_size_per_gpu": -1}, "train_micro_batch_size_per_gpu=-1: Input should be greater than 0"),
        ('{"gradient_clipping": NaN}', "gradient_clipping=NaN: Input should be a finite number"),
        ('{"gradient_clipping": 1e999}', "gradient_clipping=Infinity: Input should be a finite number"),
        ('{"zero_optimization": {"sub_group_size": -Infinity}}', "zero_optimization.sub_group_size=-Infinity: Input"),
        ({"optimizer": {"params": {"eps": -1}}}, "optimizer.params.eps=-1: Input should be greater than 0"),
        ({"optimizer": {"params": {"betas": ["auto", 0.9]}}},
         "optimizer.params.betas[0]='auto': Input should be a valid number"),
        ({"optimizer": {"params": {"betas": [0.9, 1]}}}, "optimizer.params.betas[1]=1: Input should be less than 1"),
        ({"fp16": {"enabled": True, "loss_scale": "big"}}, "fp16.loss_scale='big': Input should be a valid number"),
        ({"fp16": {"enabled": "true"}}, "fp16.enabled='true' is not supported; set it to true or false"),
        ({"zero_optimization": True}, "zero_optimization=true must be a section"),
        ({"zero_optimization": "auto"}, "zero_optimization='auto' must be a section"),
        ({"bf16": True}, "bf16=true must be a section"),
        ({"optimizer": []}, "optimizer=[] must be a section"),
        ({"optimizer": {"params": 3}}, "optimizer.params=3 must be a section"),
        ({"zero_optimization": {"offload_optimizer": "cpu"}},
         "zero_optimization.offload_optimizer='cpu' must be a section"),
        ({"scheduler": "WarmupLR"}, "scheduler is not supported: the schedule is the stage's"),
        ({"zero_optimization.stage": 3}, "'zero_optimization.stage' is not a key"),
        ({"stagee": "auto"}, "'stagee' is not a key"),
        ({"bf16": {"enabled": False}}, "bf16.enabled=false contradicts"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": True},
                                "offload_param": {"device": "cpu", "pin_memory": False}}},
         "zero_optimization.offload_param.pin_memory=false contradicts "
         "zero_optimization.offload_optimizer.pin_memory=true of the same file: both are "
         "parallel.deepspeed.pin_memory"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}},
         "fp16.enabled=true contradicts bf16.enabled=true of the same file"),
        ({"zero_optimization": {"stage": 3}, "optimizer": {"params": {"lr": 1}}},
         "optimizer.params.lr=1 contradicts the stage's optimizer.lr=0.01;"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_the_json_is_said_of_its_file_and_key(ready: Any, expected: str, tmp_path: Path) -> None:
    message = refusal(tmp_path, ready)
    assert message.startswith(f"{tmp_path / 'ready.json'}: {expected}")
    assert "stage.yaml" not in message


def test_null_and_auto_leave_sections_and_values_to_the_stage(tmp_path: Path) -> None:
    silent = {"scheduler": None, "bf16": None, "train_batch_size": "auto", "zero_optimization": {"stage": None}}
    assert stage_with(tmp_path, silent) == stage_with(tmp_path, {})


def test_a_count_in_words_agrees_with_the_same_number(tmp_path: Path) -> None:
    ready = {"zero_optimization": {"reduce_bucket_size": 5e7}}
    stage = stage_with(tmp_path, ready, "parallel.deepspeed.reduce_bucket_size=50M")
    assert stage.parallel.deepspeed.reduce_bucket_size == 50_000_000


@pytest.mark.parametrize("value", ["3", "true", "1.5", "zero_quantized_weights", "[mics_shard_size]", ""])
def test_the_section_itself_must_be_one(value: str, tmp_path: Path) -> None:
    message = refusal(tmp_path, {}, f"parallel.deepspeed={value}")
    assert f"stage.yaml: parallel.deepspeed={yaml.safe_load(value)!r}: Input should be an object" in message


def test_no_path_is_none_of_a_json(tmp_path: Path) -> None:
    message = refusal(tmp_path, {}, "parallel.deepspeed.config=")
    assert "stage.yaml: parallel.deepspeed.config=None must be the path of a DeepSpeed JSON file" in message


def test_an_unknown_key_of_the_section_is_answered_with_its_keys(tmp_path: Path) -> None:
    message = refusal(tmp_path, {}, "parallel.deepspeed.zero_stages=1")
    assert "'parallel.deepspeed.zero_stages'; known keys are zero_stage, " in message
    assert message.endswith(", fp16, config")
    message = refusal(tmp_path, {}, "parallel.deepspeed.fp16.scale=1")
    assert "'parallel.deepspeed.fp16.scale'; known keys are loss_scale, " in message
