"""A sweep's folder: the settings that all its runs share, and which sweeps lie side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_palimpsa.config import ConfigError, read_as, read_tree, write_yaml
from megatron_palimpsa.experiments.mqar.config import SweepConfig, settings

SETTINGS = "settings.yaml"
_ANY_SELECTION = {"lrs": [1.0], "seeds": [0]}


def claim_folders(configs: Sequence[SweepConfig]) -> None:
    """Make each sweep's folder with its settings, or see that those in it are the same.

    Raises:
        ConfigError: the sweeps do not have one `output_dir` and a name each; a folder holds runs with other settings.
    """
    places = list(dict.fromkeys(config.output_dir for config in configs))
    if len(places) > 1:
        raise ConfigError(f"the recipes write to different folders: {', '.join(places)}; give them one output_dir")
    names = [config.name for config in configs]
    if len(set(names)) < len(names):
        raise ConfigError(f"two recipes have one folder: their names are {', '.join(names)}")
    for config in configs:
        _check_settings(config)
    for config in configs:
        file = config.folder / SETTINGS
        if not file.exists():
            config.folder.mkdir(parents=True, exist_ok=True)
            temporary = file.with_name(f".settings.{os.getpid()}.tmp")
            temporary.write_text(write_yaml(settings(config)))
            temporary.replace(file)


def sweeps_in(output_dir: str) -> list[SweepConfig]:
    """Every sweep in the folder by name, its selection of runs aside.

    Raises:
        ConfigError: settings cannot be read.
    """
    return [_read(file, output_dir) for file in sorted(Path(output_dir).glob(f"*/{SETTINGS}"))]


def _read(file: Path, output_dir: str) -> SweepConfig:
    # What was not a setting yet when the folder was made has its default.
    tree = {**read_tree(file), "output_dir": output_dir, "sweep": _ANY_SELECTION}
    return read_as(SweepConfig, tree, str(file))


def _check_settings(config: SweepConfig) -> None:
    file = config.folder / SETTINGS
    if not file.exists():
        return
    before, now = _flat(settings(_read(file, config.output_dir))), _flat(settings(config))
    differing = [
        f"{key}={now.get(key)!r} (there {before.get(key)!r})"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if differing:
        raise ConfigError(
            f"{config.folder} holds runs with other settings: {', '.join(differing)}; "
            f"give the sweep another name or output_dir, or remove that folder to start anew"
        )


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, tuple):
        value = {str(index): item for index, item in enumerate(value)}
    if not isinstance(value, dict):
        return {prefix.removesuffix("."): value}
    return {key: item for name, part in value.items() for key, item in _flat(part, f"{prefix}{name}.").items()}
