"""Which id follows, of the logits of every row of a batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_palimpsa.config import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How ids are drawn.

    Raises:
        ConfigError: a setting is out of its range.
    """

    temperature: float = 0.0
    """Divides the logits; 0 takes the most probable id."""
    top_k: int = 0
    """Draw among the k most probable ids only; 0 does not restrict."""
    top_p: float = 1.0
    """Draw among the most probable ids that together reach this probability only."""
    seed: int = 0

    def __post_init__(self) -> None:
        # Not "temperature < 0": it would let NaN through.
        if not (self.temperature >= 0 and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise ConfigError(
                f"sampling needs temperature >= 0, top_k >= 0 and 0 < top_p <= 1, "
                f"not temperature={self.temperature}, top_k={self.top_k}, top_p={self.top_p}"
            )
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"the seed of the sampling must lie in 0 to 2**64 - 1, not {self.seed}")


class Draws:
    """Random numbers of each row, which depend on the seed and on the row's number alone, not on its company."""

    def __init__(self, seed: int, rows: Iterable[int]) -> None:
        self._generators = [np.random.default_rng([seed, row]) for row in rows]

    def next(self) -> Tensor:
        """[B] fp64 in [0, 1), on the CPU."""
        return torch.tensor([generator.random() for generator in self._generators], dtype=torch.float64)


def choose(logits: Tensor, sampling: Sampling, draws: Draws) -> Tensor:
    """Draw an id for each row of logits [B, V] -> [B] int64, on the same device; the host does not wait for it."""
    if sampling.temperature == 0.0:
        return logits.argmax(-1)
    logits, ids = logits.float().sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        logits, ids = logits[:, : sampling.top_k], ids[:, : sampling.top_k]
    # Below zero, where the smallest temperature overflows to -inf, which is a probability of 0.
    probabilities = ((logits.double() - logits[:, :1]) / sampling.temperature).softmax(-1)
    # The id that crosses top_p still belongs to the set, so that it is never empty.
    before = probabilities.cumsum(-1) - probabilities
    kept = probabilities.where((before < sampling.top_p) | (before <= 0), 0.0)
    reached = kept.cumsum(-1)
    goal = draws.next().to(logits.device, non_blocking=True)[:, None] * reached[:, -1:]
    # Rounding may take the goal to the very end.
    place = (reached <= goal).sum(-1, keepdim=True).minimum((kept > 0).sum(-1, keepdim=True) - 1)
    return ids.gather(-1, place)[:, 0]
