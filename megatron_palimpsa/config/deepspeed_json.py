"""A ready DeepSpeed JSON under a stage: taken over where the stage says nothing, and in agreement with it elsewhere."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from megatron_palimpsa.config.deepspeed_keys import (
    FIXED,
    KNOWN,
    OURS,
    REFUSED,
    SCHEDULER,
    SECTION,
    is_section,
)
from megatron_palimpsa.config.schema import StageConfig
from megatron_palimpsa.config.sections import field_type
from megatron_palimpsa.config.values import STRICT, ConfigError, parse_count


class _Setting(NamedTuple):
    """One value of the JSON in the stage's terms."""

    key: str
    """In the JSON, such as `zero_optimization.stage`."""
    given: Any
    """By the JSON."""
    ours: str
    """In the stage, such as `parallel.deepspeed.zero_stage`."""
    value: Any
    """In the stage."""
    times: str = ""
    """What it takes from `given` to `value`."""

    @property
    def said(self) -> str:
        return _said(self.key, self.given) + self.times


def refuse_by_name(tree: dict[str, Any], where: str) -> None:
    """Raises ConfigError where a stage's `parallel.deepspeed` names what is not offered."""
    section = _find(tree, SECTION.split("."))
    for name, reason in REFUSED.items():
        if isinstance(section, dict) and name in section:
            raise ConfigError(f"{where}: {SECTION}.{name} is not supported: {reason}")


def anchor_ready(tree: dict[str, Any], folder: Path) -> None:
    """Make the path of the JSON relative to the file that names it, in place."""
    section = _find(tree, SECTION.split("."))
    if isinstance(section, dict) and isinstance(section.get("config"), str):
        section["config"] = str(folder / section["config"])


def merge_ready(tree: dict[str, Any], where: str) -> dict[str, Any]:
    """The stage's tree with the JSON that `parallel.deepspeed.config` names in it, in place of its name.

    Raises:
        ConfigError: names the key of the JSON that is unknown, not supported, wrong, or says something else than the
            stage or than another key of the JSON.
    """
    section = _find(tree, SECTION.split("."))
    if not isinstance(section, dict) or "config" not in section:
        return tree
    tree = copy.deepcopy(tree)
    path = _find(tree, SECTION.split(".")).pop("config")
    if not isinstance(path, str):
        raise ConfigError(
            f"{where}: {SECTION}.config={path!r} must be the path of a DeepSpeed JSON file; without one, leave it out"
        )
    taken: dict[str, str] = {}
    for setting in _settings(_read(path), path, tree):
        value = _checked(setting, path)
        *sections, name = setting.ours.split(".")
        place = tree
        for part in sections:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{where}: {part}={place!r} must be a section")
        if name not in place:
            place[name], taken[setting.ours] = value, setting.said
        elif _number(place[name]) != value:
            other = f"the stage's {setting.ours}={_text(place[name])}"
            if setting.ours in taken:
                other = f"{taken[setting.ours]} of the same file: both are {setting.ours}"
            raise ConfigError(f"{path}: {setting.said} contradicts {other}; make them agree, or leave one out")
    return tree


def _checked(setting: _Setting, path: str) -> Any:
    """The setting's value, as the stage takes it."""
    try:
        # Through JSON, as the rest of the stage.
        return TypeAdapter(field_type(StageConfig, setting.ours), config=STRICT).validate_json(
            json.dumps(setting.value)
        )
    except ValidationError as error:
        raise ConfigError(f"{path}: {setting.said}: {error.errors()[0]['msg']}") from None


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
        _check_value(key, value, path)
    yield from _precision(values, path, stage)
    for key, value in values.items():
        if key in OURS and _in_use(key, values):
            yield _Setting(key, value, OURS[key], value)
    for key, ours in (("offload_optimizer", "offload_optimizer"), ("offload_param", "offload_parameters")):
        device = f"zero_optimization.{key}.device"
        if device in values:
            yield _Setting(device, values[device], f"{SECTION}.{ours}", values[device] == "cpu")
    betas = "optimizer.params.betas"
    for index, beta in enumerate(values.get(betas, ())):
        yield _Setting(f"{betas}[{index}]", beta, f"optimizer.beta{index + 1}", beta)
    length = _number(_find(stage, ["model", "seq_length"]))
    if "train_batch_size" in values and isinstance(length, int) and length > 0:
        sequences = values["train_batch_size"]
        times = f" times model.seq_length={length}"
        yield _Setting("train_batch_size", sequences, "train.global_batch_tokens", sequences * length, times)


def _leaves(tree: dict[str, Any], prefix: str, path: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = prefix + name
        if is_section(key) and isinstance(value, dict):
            yield from _leaves(value, f"{key}.", path)
            continue
        _check_name(key, name, value, path)
        if value is not None and value != "auto":
            yield key, _whole(value)


def _check_name(key: str, name: str, value: Any, path: str) -> None:
    if is_section(key):
        if value is not None:
            raise ConfigError(f"{path}: {_said(key, value)} must be a section (an object in braces)")
    elif key == "scheduler":
        if value is not None:
            raise ConfigError(f"{path}: scheduler is not supported: {SCHEDULER}")
    elif "." in name or (key not in KNOWN and key.removeprefix("zero_optimization.") not in REFUSED):
        raise ConfigError(f"{path}: {key!r} is not a key that this engine takes from a DeepSpeed JSON; remove it")


def _check_value(key: str, value: Any, path: str) -> None:
    reason = REFUSED.get(key.removeprefix("zero_optimization."))
    if reason and value is not False:
        raise ConfigError(f"{path}: {_said(key, value)} is not supported: {reason}")
    if key in FIXED and not any(type(value) is type(one) and value == one for one in FIXED[key]):
        allowed = " or ".join(_text(one) for one in FIXED[key] if one is not None)
        raise ConfigError(f"{path}: {_said(key, value)} is not supported; set it to {allowed}, or remove it")
    if key == "optimizer.params.betas" and not (isinstance(value, list) and len(value) == 2):
        raise ConfigError(f"{path}: {_said(key, value)} must be two numbers")
    if key == "train_batch_size" and not (type(value) is int and value > 0):
        raise ConfigError(f"{path}: {_said(key, value)} must be a whole number above 0, the sequences of a step")


def _in_use(key: str, values: dict[str, Any]) -> bool:
    """Whether the section that a value belongs to is switched on."""
    if key.startswith("fp16."):
        return values.get("fp16.enabled") is True
    if key.endswith(".pin_memory"):
        return values.get(key.replace("pin_memory", "device")) == "cpu"
    return True


def _precision(values: dict[str, Any], path: str, stage: dict[str, Any]) -> Iterator[_Setting]:
    asked = _find(stage, ["train", "precision"]) or "bf16"
    for name in ("bf16", "fp16"):
        key = f"{name}.enabled"
        if values.get(key) is True:
            yield _Setting(key, True, "train.precision", name)
        elif values.get(key) is False and asked == name and values.get("fp16.enabled") is not True:
            raise ConfigError(
                f"{path}: {key}=false contradicts the stage's train.precision={asked}; set train.precision=fp32, or "
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
    """As JSON has it: true, NaN; with quotes that tell text from a number."""
    return json.dumps(value) if isinstance(value, (bool, float)) else repr(value)
