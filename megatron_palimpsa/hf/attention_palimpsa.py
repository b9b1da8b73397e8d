"""Causal attention over cached keys and values, for rows padded on the left."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache

from .configuration_palimpsa import PalimpsaHybridConfig


class PalimpsaAttention(nn.Module):
    """Causal attention with grouped queries; with `rotary_base`, rotary position embeddings (arXiv 2104.09864).

    `qkv_proj` holds for each key-value head its queries' rows, then the key's, then the value's.
    """

    def __init__(self, config: PalimpsaHybridConfig, layer_idx: int) -> None:
        super().__init__()
        assert config.num_attention_heads is not None
        assert config.num_key_value_heads is not None
        self.layer_idx = layer_idx
        self.key_heads = config.num_key_value_heads
        self.share = config.num_attention_heads // self.key_heads
        self.rotary_base = config.rotary_base
        head_dim = config.hidden_size // config.num_attention_heads
        self.qkv_proj = nn.Linear(config.hidden_size, self.key_heads * (self.share + 2) * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, config.hidden_size, bias=False)

    def forward(self, u: Tensor, cache: Cache | None = None, padding: Tensor | None = None) -> Tensor:
        """u [B, T, hidden size]; padding [B, L], True where one of all L tokens so far is none."""
        qkv = self.qkv_proj(u).unflatten(-1, (self.key_heads, self.share + 2, -1))
        q = qkv[..., : self.share, :].flatten(2, 3).transpose(1, 2)
        k, v = (qkv[..., self.share + part, :].transpose(1, 2) for part in (0, 1))
        if self.rotary_base is not None:
            # Padding moves all places of a row, and only their differences count.
            first = 0 if cache is None else cache.get_seq_length(self.layer_idx)
            q, k = _rotated(q, first, self.rotary_base), _rotated(k, first, self.rotary_base)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        tokens, length = q.shape[2], k.shape[2]
        mask = None
        if padding is not None or 1 < tokens < length:
            mask = _attention_mask(padding, tokens, length, q.device)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None and tokens == length, enable_gqa=self.share > 1
        )
        return self.o_proj(y.transpose(1, 2).flatten(2))


def _rotated(x: Tensor, first: int, base: float) -> Tensor:
    """x [B, heads, T, D] at the places `first`, `first` + 1, ...: channels i and i + D / 2 turned in fp32."""
    half = x.shape[-1] // 2
    rates = base ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    places = torch.arange(first, first + x.shape[2], dtype=torch.float64, device=x.device)
    angles = torch.outer(places, rates)
    cos, sin = angles.cos().float(), angles.sin().float()
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def _attention_mask(padding: Tensor | None, tokens: int, length: int, device: torch.device) -> Tensor:
    """What the last T of L tokens attend to, [1 or B, 1, T, L]."""
    places = torch.arange(length, device=device)
    own = places[length - tokens :, None]
    mask = (places <= own)[None, None]
    if padding is None:
        return mask
    # A padded token attends to itself: a softmax over nothing would be NaN.
    return mask & ~padding[:, None, None, :] | (places == own)
