"""A sweep's folder: the settings that all its runs share, and which sweeps lie side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_palimpsa.config import ConfigError, read_as, read_tree, writable_place, write_yaml
from megatron_palimpsa.experiments.mqar.config import SweepConfig, settings
from megatron_palimpsa.experiments.mqar.files import lock, write_whole

SETTINGS = "settings.yaml"
_ANY_SELECTION = {"lrs": [1.0], "seeds": [0]}


def claim_folders(configs: Sequence[SweepConfig]) -> None:
    """Make each sweep's folder with its settings, or see that those in it are the same.

    Raises:
        ConfigError: as `common_folder`; a folder holds runs with other settings.
    """
    place = Path(common_folder(configs))
    if (place / SETTINGS).exists():
        raise ConfigError(f"output_dir={str(place)!r} is the folder of a sweep; name the one above it, or another")
    for config in configs:
        writable_place(config.folder, "output_dir")
    for config in configs:
        _check_settings(config)
    for config in configs:
        with lock(config.folder, wait=True):
            # Another process may have had the folder in between.
            if not _check_settings(config):
                write_whole(config.folder / SETTINGS, write_yaml(settings(config)).encode())


def common_folder(configs: Sequence[SweepConfig]) -> str:
    """The `output_dir` of all.

    Raises:
        ConfigError: the sweeps do not have one `output_dir` and a name each.
    """
    places = list(dict.fromkeys(config.output_dir for config in configs))
    if len(places) > 1:
        raise ConfigError(f"the recipes write to different folders: {', '.join(places)}; give them one output_dir")
    names = [config.name for config in configs]
    if len(set(names)) < len(names):
        raise ConfigError(f"two recipes have one folder: their names are {', '.join(names)}")
    return places[0]


def sweeps_in(output_dir: str) -> list[SweepConfig]:
    """Every sweep in the folder by name, its selection of runs aside.

    Raises:
        ConfigError: settings cannot be read, or are those of another folder.
    """
    configs = []
    for file in sorted(Path(output_dir).glob(f"*/{SETTINGS}")):
        config = _read(file, output_dir)
        if config.folder != file.parent:
            raise ConfigError(
                f"{file} is of the sweep {config.name}, whose folder is {config.folder}; give the folder that name "
                f"back, or move a copy out of {output_dir}"
            )
        configs.append(config)
    return configs


def _read(file: Path, output_dir: str) -> SweepConfig:
    # What was not a setting yet when the folder was made has its default.
    tree = {**read_tree(file), "output_dir": output_dir, "sweep": _ANY_SELECTION}
    return read_as(SweepConfig, tree, str(file))


def _check_settings(config: SweepConfig) -> bool:
    """-> whether the folder has the settings already."""
    file = config.folder / SETTINGS
    if not file.exists():
        if next(config.folder.glob("lr-*-seed-*/[!.]*"), None) is not None:
            raise ConfigError(
                f"{config.folder} holds runs, but no {SETTINGS} that says what of; give the sweep another name or "
                f"output_dir, or remove that folder to start anew"
            )
        return False
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
    return True


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, tuple):
        value = {str(index): item for index, item in enumerate(value)}
    if not isinstance(value, dict):
        return {prefix.removesuffix("."): value}
    return {key: item for name, part in value.items() for key, item in _flat(part, f"{prefix}{name}.").items()}
