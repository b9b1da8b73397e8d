"""Stage recipes that ship with the package, one YAML a stage."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def path(name: str) -> Path:
    """The file of a packaged recipe, `path("demo/instruct")`.

    Raises:
        ValueError: no such recipe; names the ones there are.
    """
    folder = Path(str(files(__name__)))
    recipe = folder / f"{name}.yaml"
    if not recipe.is_file():
        known = sorted(str(file.relative_to(folder).with_suffix("")) for file in folder.rglob("*.yaml"))
        raise ValueError(f"no packaged recipe {name!r}; there are {', '.join(known)}")
    return recipe
