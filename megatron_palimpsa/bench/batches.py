"""Microbatches to measure with: random tokens in documents of mixed lengths, or the stage's own data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch

from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.training.batch import Batch

_SHORTEST_SHARE = 1 / 64
_DISTINCT = 64


def random_batches(config: StageConfig, dp_rank: int, dp_size: int) -> Iterator[Batch]:
    """Endless microbatches of a data-parallel rank: in each step the same ones, shared out over any number of ranks."""
    count = config.num_microbatches(dp_size)
    numbers = [(dp_rank * count + index) % _DISTINCT for index in range(count)]
    made = {number: random_batch(config, seed=config.seed + number) for number in dict.fromkeys(numbers)}
    return itertools.cycle([made[number] for number in numbers])


def own_batches(config: StageConfig, dp_rank: int, dp_size: int) -> Iterator[Batch]:
    """Endless microbatches of a data-parallel rank from the stage's training data, as training takes them.

    Raises:
        ConfigError: as `StageData`.
    """
    from megatron_palimpsa.training.data import StageData

    return StageData(config).train_batches(0, dp_rank, dp_size)


def random_batch(config: StageConfig, seed: int) -> Batch:
    """One full microbatch of the stage, the same for the same seed.

    Documents are cut off at each sequence's end, as packed ones are; their lengths are log-uniform between 1/64 of
    `seq_length` and the whole of it.
    """
    generator = torch.Generator().manual_seed(seed)
    length, sequences = config.model.seq_length, config.train.micro_batch_size
    tokens = torch.randint(config.model.vocab_size, (1, length * sequences), generator=generator)
    offsets = [0]
    for sequence in range(sequences):
        end = (sequence + 1) * length
        while offsets[-1] < end:
            share = math.exp(math.log(_SHORTEST_SHARE) * float(torch.rand((), generator=generator)))
            offsets.append(min(offsets[-1] + max(1, round(length * share)), end))
    mask = torch.ones(1, length * sequences)
    mask[0, torch.tensor(offsets[1:]) - 1] = 0.0
    return Batch(tokens, tokens.roll(-1, dims=1), mask, torch.tensor(offsets, dtype=torch.int32))
