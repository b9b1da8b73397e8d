"""Root-mean-square norms, of the residual stream and in the mixers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .kernels_palimpsa import rms_norm


class PalimpsaRMSNorm(nn.Module):
    """Over all channels, or, with a gate, which comes first, within `groups` of them."""

    def __init__(self, channels: int, eps: float, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.eps = eps
        self.group_size = channels // groups

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """x, gate [..., channels] -> the same shape in the weight's dtype."""
        return rms_norm(x, gate, self.weight, self.eps, self.group_size)


class PalimpsaHeadRMSNorm(nn.Module):
    """Within each head, whose weight [head_dim] all heads share, and then times silu(gate)."""

    def __init__(self, head_dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(head_dim))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate [..., H * head_dim] -> the same shape."""
        head_dim = len(self.weight)
        weight = self.weight.repeat(x.shape[-1] // head_dim)
        return rms_norm(x, None, weight, self.eps, head_dim) * F.silu(gate)
