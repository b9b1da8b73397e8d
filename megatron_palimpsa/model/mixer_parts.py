"""What a mixer is made with, what its projections give, and what decoding keeps of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Filter = tuple[Tensor, Tensor | None]
"""Weight [D, d_conv] and bias [D] of a causal convolution."""


@dataclass(frozen=True)
class MixerOptions:
    """What the mixer needs beyond Megatron's own mamba_* settings."""

    d_conv: int = 4
    norm_groups: int | None = None
    """Groups of the gated norm over all channels; None: as many as B and C have."""
    beta_rank: int = 128
    train_prior: bool = False


@dataclass(frozen=True)
class Projected:
    """A row's projections before the convolution."""

    x: Tensor
    """Values [B, T, H * V]."""
    bc: Tensor
    """Keys beside queries (Mamba2's B beside C), [B, T, 2 * G * K]."""
    dt: Tensor
    """[B, T, H] before bias and softplus"""
    beta_low: Tensor | None
    """[B, T, beta_rank]; None without importance"""
    strength: Tensor | None = None
    """[B, T, H] before the sigmoid: how strongly a token is written; None where that is dt."""


@dataclass(frozen=True)
class MixerState:
    """What decoding keeps of the tokens so far: the inputs in reach of the convolutions and the matrix states."""

    conv_x: Tensor
    """[B, H * V, d_conv - 1]"""
    conv_bc: Tensor
    """[B, 2 * G * K, d_conv - 1]"""
    memory: tuple[Tensor, ...]
    """(M,), or (M, Ibar) with importance: each [B, H, V, K] fp32."""

    @classmethod
    def side_by_side(cls, rows: Sequence[MixerState]) -> MixerState:
        """One state of all rows, in their order."""
        return cls(
            torch.cat([row.conv_x for row in rows]),
            torch.cat([row.conv_bc for row in rows]),
            tuple(map(torch.cat, zip(*(row.memory for row in rows), strict=True))),
        )
