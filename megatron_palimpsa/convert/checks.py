"""Whether a file holds a model's tensors."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.engine.boxes import Shape

_MOST_NAMED = 5


def require_tensors(
    found: Mapping[str, Shape], wanted: Mapping[str, Shape], allowed: Mapping[str, Shape], where: str
) -> None:
    """Refuse tensors by name and shape, unless they are all of `wanted` and none but those in `allowed` too.

    Raises:
        ConfigError: begins with `where`; names what is missing, not known or of another shape.
    """
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} is not known" for name in sorted(found.keys() - allowed.keys())]
    problems += [
        f"{name} is {list(found[name])} and not {list(shape)}"
        for name, shape in allowed.items()
        if name in found and found[name] != shape
    ]
    if problems:
        more = f"; and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        raise ConfigError(f"{where}: {'; '.join(problems[:_MOST_NAMED])}{more}")
