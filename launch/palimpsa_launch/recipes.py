"""Which recipes a command names: files, names of packaged recipes, and run files that list stages in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_palimpsa.config import ConfigError, read_as, read_tree
from palimpsa_launch import stages


@dataclass(frozen=True)
class RunFile:
    """A run: its stages and preparations, in order."""

    stages: list[str] = field(default_factory=list)
    """Paths of their recipes, relative to this file."""


def find_recipes(names: Sequence[str]) -> list[Path]:
    """The recipes of stages and preparations that the names stand for, in order; run files are followed.

    Raises:
        ConfigError: no such file or packaged recipe; or a run file that cannot be read.
    """
    return [recipe for name in names for recipe in _expand(find_recipe(name))]


def is_run_file(name: str) -> bool:
    """Whether the recipe of this name lists others."""
    return "stages" in read_tree(find_recipe(name))


def find_recipe(name: str) -> Path:
    """The file of a name: of a YAML file, or of a packaged recipe.

    Raises:
        ConfigError: there is no such packaged recipe.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return path
    try:
        return stages.path(name)
    except ValueError as error:
        raise ConfigError(f"{name!r} is neither a YAML file nor a packaged recipe: {error}") from None


def _expand(path: Path) -> list[Path]:
    tree = read_tree(path)
    if "stages" not in tree:
        return [path]
    listed = read_as(RunFile, tree, str(path)).stages
    if not listed:
        raise ConfigError(f"{path}: stages lists no recipe")
    return [path.parent / item for item in listed]
