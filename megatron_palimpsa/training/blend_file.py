"""Blend files: YAML lists of prepared sets with their shares of the tokens."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_palimpsa.config import ConfigError, parse_yaml

REMEDY = "prepare the data first, or start where that path leads to it"


@dataclass(frozen=True)
class BlendEntry:
    """One set of a blend: its folder, its share of the tokens, and how often its documents may be repeated."""

    folder: Path
    weight: float
    epochs: float | None


def read_blend(path: Path, where: str) -> list[BlendEntry]:
    """Read a YAML list of {set, weight, epochs?}; folders of sets are relative to the file.

    Raises:
        ConfigError: names `where`, the entry, the key and what is allowed.
    """
    try:
        content = parse_yaml(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: cannot read the blend: {error}; {REMEDY}") from None
    if not isinstance(content, list) or not content:
        raise ConfigError(f"{where}: expected a list of entries {{set, weight, epochs}}")
    return [_entry(item, path.parent, f"{where}, entry {number}") for number, item in enumerate(content, 1)]


def _entry(item: Any, folder: Path, where: str) -> BlendEntry:
    if not isinstance(item, dict):
        raise ConfigError(f"{where}: expected {{set, weight, epochs}}, found {item!r}")
    for key in sorted(map(str, item.keys() - {"set", "weight", "epochs"})):
        raise ConfigError(f"{where}: unknown key {key!r}; known keys are set, weight, epochs")
    for key in ("set", "weight"):
        if key not in item:
            raise ConfigError(f"{where}: {key} is missing")
    if not isinstance(item["set"], str):
        raise ConfigError(f"{where}: set={item['set']!r} must be the folder of a prepared set")
    epochs = None if item.get("epochs") is None else _positive(item["epochs"], "epochs", where)
    return BlendEntry(folder / item["set"], _positive(item["weight"], "weight", where), epochs)


def _positive(value: Any, key: str, where: str) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf or value > sys.float_info.max:
        raise ConfigError(f"{where}: {key}={value!r} must be a number above 0")
    return float(value)
