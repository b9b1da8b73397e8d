"""Needle documents as inputs of a job: no files, but stretches of the endless series that a seed gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from palimpsa_data import tokenizers
from palimpsa_data.documents import Item
from palimpsa_data.files import json_sha256
from palimpsa_data.needles.generate import NeedleOptions, needle

_RECIPE = 1  # raise it when the same options are to give other documents
_BYTES_A_TOKEN = 4  # about; for progress and free space


@dataclass(frozen=True)
class NeedleInput:
    """Documents `first` to `stop`: a future shard."""

    first: int
    stop: int
    bytes: int

    @property
    def name(self) -> str:
        return f"needles {self.first} to {self.stop - 1}"

    @property
    def path(self) -> Path:
        return Path(self.name)

    def sha256(self) -> str:
        return json_sha256(["needles", _RECIPE, self.first, self.stop])


def needle_inputs(options: NeedleOptions) -> list[NeedleInput]:
    """`options.documents` in as many stretches as there are to be shards."""
    bounds = [options.documents * shard // options.shards for shard in range(options.shards + 1)]
    size = options.longest * _BYTES_A_TOKEN
    return [NeedleInput(first, stop, (stop - first) * size) for first, stop in itertools.pairwise(bounds)]


@dataclass(frozen=True)
class NeedleReader:
    """`PrepJob.read` of needles; lengths are counted with the job's own tokenizer."""

    tokenizer: Path
    backend: str

    def __call__(self, source: NeedleInput, options: NeedleOptions, progress: Callable[[int], None]) -> Iterator[Item]:
        tokenizer = tokenizers.load(self.tokenizer, backend=self.backend)

        def tokens(texts: Sequence[str]) -> Sequence[int]:
            return np.diff(tokenizer.encode_flat(texts).offsets).tolist()

        count = source.stop - source.first
        for index in range(source.first, source.stop):
            yield needle(options, index, tokens)
            progress(source.bytes * (index + 1 - source.first) // count)
