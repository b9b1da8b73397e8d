"""The configurations of one `bench` run, all read and checked before anything starts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_palimpsa.config import ConfigError, StageConfig, check_stage, load_stage, read_tree

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Case:
    """One configuration to measure."""

    name: str
    overrides: list[str]
    """Against the stage's file, `section.key=value` each."""
    config: StageConfig


def read_cases(
    path: Path, overrides: list[str], cases: list[str], world_size: int, layouts: Path | None = None
) -> list[Case]:
    """The stage with `overrides` under each of the `layouts`, then once for each `NAME:key=value,key=value` of `cases`.

    Without either it is the stage as it is. Layouts that the number of ranks does not allow are left out, and said.

    Args:
        layouts: a YAML file that maps names to lists of overrides.

    Raises:
        ConfigError: a case is malformed, named twice, or its configuration cannot run on `world_size` ranks; no layout
            is left.
    """
    changes = [] if layouts is None else _layouts(layouts, path, overrides, world_size)
    changes += [_split(text) for text in cases]
    read: dict[str, Case] = {}
    for name, own in changes or [("stage", [])]:
        if name in read:
            raise ConfigError(f"case {name}: another case has that name")
        try:
            config = load_stage(path, [*overrides, *own])
            check_stage(config, world_size)
        except ConfigError as error:
            raise ConfigError(f"case {name}: {error}" if changes else str(error)) from None
        read[name] = Case(name, [*overrides, *own], config)
    return list(read.values())


def _split(text: str) -> tuple[str, list[str]]:
    name, _, changes = text.partition(":")
    if not _is_name(name):
        raise ConfigError(f"--case {text!r}: expected NAME:section.key=value,section.key=value")
    return name, [change for change in changes.split(",") if change]


def _is_name(name: object) -> bool:
    """It becomes a folder's too."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set("=/") & set(name)


def _layouts(file: Path, stage: Path, overrides: Sequence[str], world_size: int) -> list[tuple[str, list[str]]]:
    found, left_out = [], []
    for name, own in read_tree(file).items():
        if not _is_name(name) or not isinstance(own, list) or not all(isinstance(change, str) for change in own):
            raise ConfigError(f"{file}: {name!r}: {own!r}: expected NAME: [section.key=value, ...]")
        try:
            needed = load_stage(stage, [*overrides, *own]).parallel.replica_size
        except ConfigError as error:
            raise ConfigError(f"{file}: {name}: {error}") from None
        if world_size % needed:
            left_out.append(f"{name} (a multiple of {needed})")
        else:
            found.append((name, own))
    if left_out:
        logger.info("Left out on %d ranks: %s", world_size, ", ".join(left_out))
    if not found:
        raise ConfigError(f"{file}: no layout is for {world_size} ranks")
    return found
