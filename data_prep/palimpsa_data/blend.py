"""Blend files: which sets a stage takes, in which shares of its tokens, how often at the most."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from palimpsa_data.errors import DataError
from palimpsa_data.files import write_atomically
from palimpsa_data.sets import SetInfo, read_set


@dataclass(frozen=True)
class Part:
    """A set, its share of the tokens in proportion to the others' (None: its own tokens), its most epochs (None: any).

    Raises:
        DataError: a weight or epochs not above 0.
    """

    folder: Path
    weight: float | None = None
    epochs: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("weight", self.weight), ("epochs", self.epochs)):
            if value is not None and not 0 < value < float("inf"):
                raise DataError(f"set {self.folder}: {name} {value} must be a number above 0")


def write_blend(path: Path, parts: Sequence[Part]) -> list[tuple[SetInfo, float]]:
    """Write a YAML list of {set, weight, epochs}, sets relative to the file; -> each set with its share of the tokens.

    Raises:
        DataError: no set, one named twice, one that is not finished, weights for some of them alone, or sets of
            different tokenizers.
    """
    if not parts:
        raise DataError(f"{path}: a blend needs one set at least")
    if len({part.weight is None for part in parts}) > 1:
        raise DataError(f"{path}: give every set a weight, or none of them")
    infos = [read_set(part.folder) for part in parts]
    _check(parts, infos)
    weights = [info.tokens if part.weight is None else part.weight for part, info in zip(parts, infos, strict=True)]
    entries = []
    for part, weight in zip(parts, weights, strict=True):
        relative = os.path.relpath(part.folder.resolve(), path.resolve().parent)
        epochs = {} if part.epochs is None else {"epochs": part.epochs}
        entries.append({"set": relative, "weight": weight, **epochs})
    content = yaml.safe_dump(entries, sort_keys=False, allow_unicode=True).encode()
    if not path.is_file() or path.read_bytes() != content:
        write_atomically(path, content)
    whole = sum(weights)
    return [(info, weight / whole) for info, weight in zip(infos, weights, strict=True)]


def _check(parts: Sequence[Part], infos: Sequence[SetInfo]) -> None:
    folders = [part.folder.resolve() for part in parts]
    for number, (part, info) in enumerate(zip(parts, infos, strict=True)):
        if folders[number] in folders[:number]:
            raise DataError(f"set {part.folder} is named twice; give it one weight")
        if info.tokenizer != infos[0].tokenizer:
            raise DataError(f"sets {parts[0].folder} and {part.folder} were made with different tokenizers")
