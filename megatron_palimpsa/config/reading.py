"""From a stage's YAML, its bases and overrides to its configuration, and back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megatron_palimpsa.config.deepspeed_json import anchor_ready, merge_ready, refuse_by_name
from megatron_palimpsa.config.schema import StageConfig
from megatron_palimpsa.config.sections import section_at
from megatron_palimpsa.config.strict_yaml import parse_yaml, write_yaml
from megatron_palimpsa.config.values import ConfigError
from megatron_palimpsa.config.zero import DeepSpeedConfig


def load_stage(path: str | Path, overrides: list[str] | None = None) -> StageConfig:
    """Read a stage's YAML with its bases, apply `section.key=value` overrides, check types.

    Raises:
        ConfigError: names the file, the key, the value and what is allowed.
    """
    tree = read_tree(path)
    apply_overrides(tree, overrides or [])
    return stage_from_dict(tree, where=str(path))


def stage_from_dict(tree: dict[str, Any], where: str) -> StageConfig:
    """The stage in a tree of YAML's values, with the DeepSpeed JSON that `parallel.deepspeed.config` names."""
    refuse_by_name(tree, where)
    return read_as(StageConfig, merge_ready(tree, where), where)


def read_as[T](kind: type[T], tree: dict[str, Any], where: str) -> T:
    """A mapping of YAML's values as the dataclass `kind`, whose sections may be dataclasses too.

    Raises:
        ConfigError: names `where`, each wrong key, its value and what is allowed.
    """
    try:
        # Through JSON, where strict typing takes mappings for dataclasses and whole numbers for floats.
        return TypeAdapter(kind).validate_json(json.dumps(tree))
    except ValidationError as error:
        raise ConfigError(_describe(error, where, kind)) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {error}") from None


def to_dict(config: StageConfig) -> dict[str, Any]:
    return dataclasses.asdict(config)  # type: ignore[call-overload]


def save_resolved(config: StageConfig, path: Path) -> None:
    """Write the whole configuration, defaults included, so that the run can be read and repeated without its bases."""
    path.write_text(write_yaml(to_dict(config)))


def read_tree(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file, over those that its `base:` names.

    Raises:
        ConfigError: names the file that is not readable, no YAML or no mapping.
    """
    return _read_tree(Path(path), ())


def _read_tree(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in seen:
        raise ConfigError(f"{path}: base files form a circle")
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from None
    tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, found {type(tree).__name__}")
    anchor_ready(tree, path.parent)
    base = tree.pop("base", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base={base!r} must be the path of a YAML file")
    return _merge(_read_tree(path.parent / base, (*seen, path.resolve())), tree)


def _merge(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in change.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> None:
    """Change a recipe's mapping by `section.key=value`, in place.

    Raises:
        ConfigError: names the override that is none.
    """
    for override in overrides:
        _apply_override(tree, override)


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r}: expected section.key=value")
    *sections, name = key.split(".")
    for section in sections:
        child = tree.get(section)
        if child is None:
            child = tree[section] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {section!r} is not a section")
        tree = child
    if text.startswith("*"):
        # `model.pattern=*-*-`: an alias, which YAML would read, has no anchor here to be of.
        text = "'" + text.replace("'", "''") + "'"
    tree[name] = parse_yaml(text, f"override {override!r}")


def _describe(error: ValidationError, where: str, kind: type) -> str:
    lines = []
    found = error.errors()
    for item in found:
        # A list without its wrong items counts as too short, too.
        within = [other for other in found if other["loc"][: len(item["loc"])] == item["loc"]]
        if item["type"] == "too_short" and len(within) > 1:
            continue
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "unexpected_keyword_argument":
            lines.append(f"{where}: unknown key {key!r}{_known_keys(kind, item['loc'])}")
        elif item["type"] == "missing":
            lines.append(f"{where}: {key} is missing")
        else:
            lines.append(f"{where}: {key}={item['input']!r}: {item['msg']}")
    return "\n".join(lines)


def _known_keys(kind: Any, loc: tuple[int | str, ...]) -> str:
    section = section_at(kind, loc[:-1])
    keys = [field.name for field in dataclasses.fields(section)]
    if section is DeepSpeedConfig:
        keys.append("config")  # Which `merge_ready` puts the settings in place of.
    return f"; known keys are {', '.join(keys)}"
