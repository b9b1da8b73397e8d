"""The configurations of one `bench` run, all read and checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_palimpsa.config import ConfigError, StageConfig, check_stage, load_stage


@dataclass(frozen=True)
class Case:
    """One configuration to measure."""

    name: str
    overrides: list[str]
    """Against the stage's file, `section.key=value` each."""
    config: StageConfig


def read_cases(path: Path, overrides: list[str], cases: list[str], world_size: int) -> list[Case]:
    """The stage with `overrides`, once for each `NAME:key=value,key=value` of `cases`, or once where there are none.

    Raises:
        ConfigError: a case is malformed, named twice, or its configuration cannot run on `world_size` ranks.
    """
    read: dict[str, Case] = {}
    for text in cases or ["stage"]:
        name, _, changes = text.partition(":")
        own = [change for change in changes.split(",") if change]
        if not name or "=" in name or "/" in name:
            raise ConfigError(f"--case {text!r}: expected NAME:section.key=value,section.key=value")
        if name in read:
            raise ConfigError(f"--case {text!r}: another case has that name")
        try:
            config = load_stage(path, [*overrides, *own])
            check_stage(config, world_size)
        except ConfigError as error:
            raise ConfigError(f"case {name}: {error}" if cases else str(error)) from None
        read[name] = Case(name, [*overrides, *own], config)
    return list(read.values())
