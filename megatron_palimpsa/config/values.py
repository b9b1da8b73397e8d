"""Kinds of values in a stage's settings, and the error for wrong ones."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


class ConfigError(ValueError):
    """Wrong input, found before anything starts; the command line turns it into exit code 2."""


def parse_count(value: Any) -> Any:
    """`10B`, `1.5M`, `64Ki` or a plain integer -> int (K, M, B, T are powers of 1000; Ki, Mi, Gi powers of 1024)."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|[KMBT]?)", value.strip())
    if match is None:
        raise ValueError(f"expected a count such as 4096, 64Ki, 1.5M or 10B, not {value!r}")
    return round(Decimal(match[1]) * _SUFFIXES[match[2]])


_LARGEST = 2**63 - 1  # what torch takes for a size or a seed
Count = Annotated[int, BeforeValidator(parse_count), Field(gt=0, le=_LARGEST)]
Positive = Annotated[int, Field(gt=0, le=_LARGEST)]
NonNegative = Annotated[int, Field(ge=0, le=_LARGEST)]
_LARGEST_FLOAT = 1e30  # float32 still has room to compute with it
PositiveFloat = Annotated[float, Field(gt=0, le=_LARGEST_FLOAT, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=_LARGEST_FLOAT, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
