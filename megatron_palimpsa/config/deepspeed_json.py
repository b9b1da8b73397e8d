"""A ready DeepSpeed JSON under a stage: taken over where the stage says nothing, and in agreement with it elsewhere."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron_palimpsa.config.values import ConfigError, parse_count
from megatron_palimpsa.config.zero import SAME_NAMES

SECTION = "parallel.deepspeed"


class _Setting(NamedTuple):
    """One value of the JSON in the stage's terms."""

    said: str
    """By the JSON, such as `zero_optimization.stage=3`."""
    ours: str
    """In the stage, such as `parallel.deepspeed.zero_stage`."""
    value: Any


_OURS = {
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": f"{SECTION}.gradient_accumulation_steps",
    "gradient_clipping": "optimizer.clip_grad",
    "zero_optimization.stage": f"{SECTION}.zero_stage",
    **{f"zero_optimization.{name}": f"{SECTION}.{name}" for name in SAME_NAMES},
    "zero_optimization.offload_optimizer.pin_memory": f"{SECTION}.pin_memory",
    "zero_optimization.offload_param.pin_memory": f"{SECTION}.pin_memory",
    "optimizer.params.lr": "optimizer.lr",
    "optimizer.params.eps": "optimizer.eps",
    "optimizer.params.weight_decay": "optimizer.weight_decay",
    **{
        f"fp16.{name}": f"{SECTION}.fp16.{name}"
        for name in ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
    },
}
"""Keys whose value is that of a key of the stage."""

_FIXED: dict[str, tuple[Any, ...]] = {
    "communication_data_type": ("fp32", "torch.float32", None),
    "data_types.grad_accum_dtype": ("fp32", "torch.float32", None),
    "prescale_gradients": (False,),
    "gradient_predivide_factor": (1,),
    "bf16.immediate_grad_update": (True, False),
    "bf16.check_grad_overflow": (True, False),
    "fp16.auto_cast": (False,),
    "fp16.consecutive_hysteresis": (False,),
    "optimizer.type": ("AdamW", "Adam"),
    "optimizer.params.torch_adam": (True,),
    "optimizer.params.adam_w_mode": (True,),
    "optimizer.params.bias_correction": (True,),
    "optimizer.params.amsgrad": (False,),
    "zero_allow_untested_optimizer": (True,),
    "zero_force_ds_cpu_optimizer": (False,),
    "wall_clock_breakdown": (False,),
    "zero_optimization.contiguous_gradients": (True,),
    "zero_optimization.reduce_scatter": (True,),
    "zero_optimization.allgather_partitions": (True,),
    "zero_optimization.round_robin_gradients": (False,),
    "zero_optimization.ignore_unused_parameters": (True,),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (True, False),
    "zero_optimization.offload_optimizer.device": ("cpu", "none"),
    "zero_optimization.offload_optimizer.ratio": (1,),
    "zero_optimization.offload_param.device": ("cpu", "none"),
    "bf16.enabled": (True, False),
    "fp16.enabled": (True, False),
}
"""Keys whose value decides nothing here, or more than one key of the stage, and the values that are taken."""

_IGNORED = {"steps_per_print"}
"""Of DeepSpeed's own log, which is off."""

_REFUSED = {
    "zero_quantized_weights": "weights rounded to int8 on their way are not those that a checkpoint holds, and its "
    "kernels are compiled at the start; spread them over fewer ranks with zero_hpz_partition_size instead",
    "zero_quantized_nontrainable_weights": "weights rounded to int8 are not those that a checkpoint holds",
    "zero_quantized_gradients": "gradients rounded to int4 on their way are not those of one process, and its kernels "
    "are compiled at the start; leave it out",
    "mics_shard_size": "DeepSpeed has removed MiCS; zero_hpz_partition_size keeps a copy of the weights among so many "
    "ranks",
    "mics_hierarchical_params_gather": "DeepSpeed has removed MiCS; leave it out",
}
"""Of `zero_optimization` and of the stage's section: why not, and what instead."""

_SCHEDULER = (
    "the schedule is the stage's: optimizer.schedule, optimizer.warmup_steps and optimizer.min_lr; leave it out"
)


def refuse_by_name(tree: dict[str, Any], where: str) -> None:
    """Raises ConfigError where a stage's `parallel.deepspeed` names what is not offered."""
    for name, reason in _REFUSED.items():
        if name in (_find(tree, SECTION.split(".")) or {}):
            raise ConfigError(f"{where}: {SECTION}.{name} is not supported: {reason}")


def anchor_ready(tree: dict[str, Any], folder: Path) -> None:
    """Make the path of the JSON relative to the file that names it, in place."""
    section = _find(tree, SECTION.split("."))
    if isinstance(section, dict) and isinstance(section.get("config"), str):
        section["config"] = str(folder / section["config"])


def merge_ready(tree: dict[str, Any], where: str) -> dict[str, Any]:
    """The stage's tree with the JSON that `parallel.deepspeed.config` names in it, in place of its name.

    Raises:
        ConfigError: names the key of the JSON that is unknown, not supported, or says something else than the stage.
    """
    section = _find(tree, SECTION.split("."))
    if not isinstance(section, dict) or section.get("config") is None:
        return tree
    tree = copy.deepcopy(tree)
    path = _find(tree, SECTION.split(".")).pop("config")
    if not isinstance(path, str):
        raise ConfigError(f"{where}: {SECTION}.config={path!r} must be the path of a DeepSpeed JSON file")
    for setting in _settings(_read(path), path, tree):
        *sections, name = setting.ours.split(".")
        place = tree
        for part in sections:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{where}: {part}={place!r} must be a section")
        if place.setdefault(name, setting.value) != setting.value and _number(place[name]) != setting.value:
            raise ConfigError(
                f"{path}: {setting.said} contradicts {setting.ours}={_text(place[name])} of "
                f"{where}; make them agree, or leave one out"
            )
    return tree


def _read(path: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(f"{path}: {key!r} is given twice")
        return dict(pairs)

    try:
        found = json.loads(Path(path).read_text(), object_pairs_hook=unique)
    except ConfigError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{SECTION}.config: cannot read the DeepSpeed JSON {path}: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected a mapping, found {type(found).__name__}")
    return found


def _settings(tree: dict[str, Any], path: str, stage: dict[str, Any]) -> Iterator[_Setting]:
    """What the JSON says in the stage's terms; `auto` and null say nothing."""
    values = dict(_leaves(tree, "", path))
    for key, value in values.items():
        _check_known(key, value, path)
    yield from _precision(values, stage)
    for key, value in values.items():
        if key in _OURS and _in_use(key, values):
            yield _Setting(_said(key, value), _OURS[key], value)
    for key, ours in (("offload_optimizer", "offload_optimizer"), ("offload_param", "offload_parameters")):
        device = f"zero_optimization.{key}.device"
        if device in values:
            yield _Setting(_said(device, values[device]), f"{SECTION}.{ours}", values[device] == "cpu")
    betas = "optimizer.params.betas"
    for index, beta in enumerate(values.get(betas, ()), start=1):
        yield _Setting(_said(betas, values[betas]), f"optimizer.beta{index}", beta)
    if "train_batch_size" in values:
        length = _number(_find(stage, ["model", "seq_length"]))
        if isinstance(length, int) and isinstance(values["train_batch_size"], int):
            said = f"{_said('train_batch_size', values['train_batch_size'])} times model.seq_length={length}"
            yield _Setting(said, "train.global_batch_tokens", values["train_batch_size"] * length)


def _leaves(tree: dict[str, Any], prefix: str, path: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = prefix + name
        if isinstance(value, dict):
            _check_section(key, path)
            yield from _leaves(value, f"{key}.", path)
        elif value is not None and value != "auto":
            yield key, _whole(value)


_KNOWN = {*_OURS, *_FIXED, *_IGNORED, "train_batch_size", "optimizer.params.betas"}


def _check_section(key: str, path: str) -> None:
    if key == "scheduler":
        raise ConfigError(f"{path}: scheduler is not supported: {_SCHEDULER}")
    if not any(known.startswith(f"{key}.") for known in _KNOWN):
        raise ConfigError(f"{path}: {key!r} is not a key that this engine takes from a DeepSpeed JSON; remove it")


def _check_known(key: str, value: Any, path: str) -> None:
    name = key.removeprefix("zero_optimization.")
    if name in _REFUSED:
        if value is False:
            return
        raise ConfigError(f"{path}: {_said(key, value)} is not supported: {_REFUSED[name]}")
    if key not in _KNOWN:
        raise ConfigError(f"{path}: {key!r} is not a key that this engine takes from a DeepSpeed JSON; remove it")
    if key in _FIXED and not any(type(value) is type(one) and value == one for one in _FIXED[key]):
        allowed = " or ".join(_text(one) for one in _FIXED[key] if one is not None)
        raise ConfigError(f"{path}: {_said(key, value)} is not supported; set it to {allowed}, or remove it")
    if key == "optimizer.params.betas" and not (isinstance(value, list) and len(value) == 2):
        raise ConfigError(f"{path}: {_said(key, value)} must be two numbers")


def _in_use(key: str, values: dict[str, Any]) -> bool:
    """Whether the section that a value belongs to is switched on."""
    if key.startswith("fp16."):
        return values.get("fp16.enabled") is True
    if key.endswith(".pin_memory"):
        return values.get(key.replace("pin_memory", "device")) == "cpu"
    return True


def _precision(values: dict[str, Any], stage: dict[str, Any]) -> Iterator[_Setting]:
    asked = _find(stage, ["train", "precision"]) or "bf16"
    for name in ("bf16", "fp16"):
        key = f"{name}.enabled"
        if values.get(key) is True:
            yield _Setting(_said(key, True), "train.precision", name)
        elif values.get(key) is False and asked == name and values.get("fp16.enabled") is not True:
            raise ConfigError(
                f"{key}=false of the DeepSpeed JSON contradicts train.precision={asked}; set train.precision=fp32, or "
                f"remove {key}"
            )


def _find(tree: Any, keys: list[str]) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _number(value: Any) -> Any:
    try:
        return parse_count(value)
    except ValueError:
        return value


def _whole(value: Any) -> Any:
    """5e8 as the whole number that it is."""
    return int(value) if isinstance(value, float) and math.isfinite(value) and value == int(value) else value


def _said(key: str, value: Any) -> str:
    return f"{key}={_text(value)}"


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (bool, list)) else str(value)
