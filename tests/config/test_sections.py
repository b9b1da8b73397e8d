"""Unknown keys anywhere in dataclasses within dataclasses are answered with those of their own section."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from megatron_palimpsa.config import ConfigError, read_as
from megatron_palimpsa.config.sections import field_type
from megatron_palimpsa.config.values import STRICT


@dataclass(frozen=True, config=STRICT)
class Leaf:
    size: Annotated[int, Field(gt=0)] = 1


@dataclass(frozen=True, config=STRICT)
class Other:
    one: int
    leaf: Leaf | None = None


@dataclass(frozen=True, config=STRICT)
class Root:
    leaf: Leaf | None = None
    either: str | Other | None = None
    named: Annotated[dict[str, Other], Field(max_length=5)] | None = None
    listed: tuple[Other, ...] = ()


@pytest.mark.parametrize(
    ("tree", "known"),
    [
        ({"x": 1}, "leaf, either, named, listed"),
        ({"leaf": {"x": 1}}, "size"),
        ({"either": {"one": 1, "leaf": {"x": 1}}}, "size"),
        ({"either": {"one": 1, "x": 1}}, "one, leaf"),
        ({"named": {"leaf": {"one": 1, "x": 1}}}, "one, leaf"),
        ({"named": {"any": {"one": 1, "leaf": {"x": 1}}}}, "size"),
        ({"listed": [{"one": 1}, {"one": 1, "x": 1}]}, "one, leaf"),
        ({"listed": [{"one": 1, "leaf": {"x": 1}}]}, "size"),
    ],
)
def test_the_keys_of_the_section_are_listed(tree: dict[str, Any], known: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_as(Root, tree, "file")
    assert any(line.endswith(f".x'; known keys are {known}") or line.endswith(f" 'x'; known keys are {known}")
               for line in str(error.value).splitlines())  # fmt: skip


def test_a_fields_type_keeps_its_bounds() -> None:
    with pytest.raises(ValidationError, match="greater than 0"):
        TypeAdapter(field_type(Root, "either.leaf.size")).validate_python(0)
