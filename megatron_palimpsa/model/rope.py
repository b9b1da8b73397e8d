"""Rotary position embedding (arXiv 2104.09864) of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor


def rotated(query: Tensor, key: Tensor, first: int, theta: float) -> tuple[Tensor, Tensor]:
    """Turn channels i and i + D / 2 of each token by the angle place * theta ** (-2 i / D).

    A score depends on the difference of two places alone: places of a packed row are as good as those of a document.

    Args:
        query: [S, ..., D] of the last S of the keys' places; D even.
        key: [L, ..., D] of the tokens at places `first`, `first` + 1, ...

    Returns:
        Both in their dtype; formed in fp32, from angles in float64.
    """
    half = key.shape[-1] // 2
    rates = theta ** (-torch.arange(half, dtype=torch.float64, device=key.device) / half)
    places = torch.arange(first, first + len(key), dtype=torch.float64, device=key.device)
    angles = torch.outer(places, rates)
    cos, sin = angles.cos().float(), angles.sin().float()
    return _turned(query, cos[-len(query) :], sin[-len(query) :]), _turned(key, cos, sin)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    shape = (len(x), *[1] * (x.dim() - 2), x.shape[-1] // 2)
    cos, sin = cos.view(shape), sin.view(shape)
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
