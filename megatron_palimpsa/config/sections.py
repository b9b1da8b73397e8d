"""What the type hints of dataclasses within dataclasses say of a dotted key."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


def section_at(kind: Any, keys: Iterable[int | str]) -> Any:
    """The dataclass below `kind` that `keys` lead to: fields, keys of mappings, places in lists, tags of unions."""
    for key in keys:
        kind = _below(kind, key)
    return next(part for part in _alternatives(kind) if dataclasses.is_dataclass(part))


def field_type(kind: Any, key: str) -> Any:
    """The annotated type of a field by its dotted key, such as `train.tokens`."""
    *sections, name = key.split(".")
    return get_type_hints(section_at(kind, sections), include_extras=True)[name]


def _below(hint: Any, key: int | str) -> Any:
    for part in _alternatives(hint):
        if dataclasses.is_dataclass(part) and key in part.__dataclass_fields__:
            return get_type_hints(part)[str(key)]
        if get_origin(part) is dict:
            return get_args(part)[1]
        if get_origin(part) in (list, tuple):
            return get_args(part)[0]
    return hint  # The key is the tag by which pydantic names an alternative.


def _alternatives(hint: Any) -> Iterator[Any]:
    if get_origin(hint) in (Union, UnionType):
        for part in get_args(hint):
            yield from _alternatives(part)
    else:
        yield hint
