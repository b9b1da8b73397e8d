"""Examples of multi-query associative recall, each a function of seed and index alone.

An example is `pairs` keys, each with its value behind it, and then queries: every key once more, at every second place,
the sooner the likelier. At a query the model is to say the key's value. Keys are of the lower half of the vocabulary
(without token 0), values of the upper one; no example has a key or a value twice.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_palimpsa.experiments.mqar.config import MOST_NUMBERS

_AT_ONCE = 1024
_SIGN = 1 << 63
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


@dataclass(frozen=True)
class Shape:
    """Of an example."""

    vocab_size: int
    length: int
    pairs: int
    filler: Literal["blank", "random"] = "blank"
    power: float = 0.01


@dataclass(frozen=True)
class Examples:
    """N examples of L tokens with P queries each; all int64 on one device."""

    tokens: Tensor
    """[N, L]"""
    queries: Tensor
    """[N, P]: the places of the queries, in the order of the keys."""
    answers: Tensor
    """[N, P]: the label at each of them; there are no others."""

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, index: Tensor) -> Examples:
        """Those of the given numbers [B]."""
        return Examples(self.tokens[index], self.queries[index], self.answers[index])


def train_seed(seed: int) -> int:
    """Of a run's training examples; `test_seed` never gives the same number."""
    return 2 * seed


def test_seed(seed: int) -> int:
    """Of a run's test examples."""
    return 2 * seed + 1


def make_examples(shape: Shape, seed: int, index: Tensor) -> Examples:
    """Examples number `index` [N] of `seed`, on the device of `index`."""
    parts = [_make(shape, seed, numbers) for numbers in index.split(_AT_ONCE)]
    return Examples(*(torch.cat([getattr(part, name) for part in parts]) for name in ("tokens", "queries", "answers")))


def shuffled(count: int, label: str, device: torch.device) -> Tensor:
    """The numbers below `count` in an order that the label alone decides, [count] int64."""
    first = torch.zeros(1, dtype=torch.int64, device=device)
    return _random(f"order/{label}", first, count)[0].argsort(stable=True)


def _make(shape: Shape, seed: int, index: Tensor) -> Examples:
    half, pairs = shape.vocab_size // 2, shape.pairs
    of = f"{seed}/{shape.length}/{pairs}"
    keys = 1 + _distinct(f"keys/{of}", index, half - 1, pairs)
    answers = half + _distinct(f"values/{of}", index, shape.vocab_size - half, pairs)
    queries = 2 * pairs + 2 * _gaps(f"gaps/{of}", index, shape)
    tokens = torch.zeros(len(index), shape.length, dtype=torch.int64, device=index.device)
    if shape.filler == "random":
        # The remainder's bias is 2 ** -50 for a vocabulary of 8192.
        tokens = _random(f"filler/{of}", index, shape.length).bitwise_and(_SIGN - 1) % shape.vocab_size
    tokens[:, 0 : 2 * pairs : 2] = keys
    tokens[:, 1 : 2 * pairs : 2] = answers
    tokens.scatter_(1, queries, keys)
    return Examples(tokens, queries, answers)


def _distinct(stream: str, index: Tensor, choices: int, count: int) -> Tensor:
    """[N, count] different numbers below `choices` in random order, for each example."""
    return _random(stream, index, choices).topk(count).indices


def _gaps(stream: str, index: Tensor, shape: Shape) -> Tensor:
    """[N, P] different places below (L - 2 P) / 2, drawn one after another in proportion to (1 + place) ** (power - 1).

    That is the order in which independent exponential clocks of these rates ring.
    """
    places = (shape.length - 2 * shape.pairs) // 2
    rates = torch.arange(1, places + 1, dtype=torch.float64).pow(shape.power - 1).to(index.device)
    uniform = ((_random(stream, index, places) >> 11).bitwise_and((1 << 53) - 1).double() + 0.5) * 2.0**-53
    return (-uniform.log() / rates).topk(shape.pairs, largest=False).indices


def _random(stream: str, index: Tensor, width: int) -> Tensor:
    """[N, width] random int64 that depend on the stream, the example's number and the column alone (SplitMix64)."""
    start = int.from_bytes(hashlib.sha256(f"mqar/{stream}".encode()).digest()[:8], "little")
    counter = index[:, None] * MOST_NUMBERS + torch.arange(width, device=index.device)
    mixed = counter * _signed(_GOLDEN) + _signed(start)
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(multiplier)
    return mixed ^ _shifted(mixed, 31)


def _shifted(value: Tensor, places: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (value >> places).bitwise_and((1 << (64 - places)) - 1)


def _signed(value: int) -> int:
    """The int64 of the same 64 bits."""
    return value - (value & _SIGN) * 2
