"""The activations in front of the scans, in PyTorch; arXiv 2602.09075 and 2405.21060.

    dt        = softplus(dt_raw + dt_bias)                      log_alpha = max(-dt * exp(A_log), LOWEST_LOG_ALPHA)
    v         = x * write                                       beta      = sigmoid(logits) * softplus(b_scale) * write

How strongly a token is written is dt in Mamba2 and Palimpsa-M, a sigmoid of its own in Palimpsa-D.
Everything is formed in fp32; v and beta are rounded to the inputs' dtype.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

LOWEST_LOG_ALPHA = -100.0
"""exp of it is 0 beside any state in fp32; the scans take nothing lower."""


def step_and_decay(dt: Tensor, dt_bias: Tensor, A_log: Tensor) -> tuple[Tensor, Tensor]:
    """dt before its softplus [..., H], dt_bias and A_log [H] fp32 -> (dt, log_alpha) [..., H] fp32."""
    dt = F.softplus(dt.float() + dt_bias)
    return dt, (-dt * A_log.exp()).clamp(min=LOWEST_LOG_ALPHA)


def write_strength(dt: Tensor, strength: Tensor | None) -> Tensor:
    """dt [..., H] fp32; or, where there is one, the sigmoid of `strength` [..., H], in fp32."""
    return dt if strength is None else torch.sigmoid(strength.float())


def weighted_value(x: Tensor, write: Tensor) -> Tensor:
    """x [..., H, V] times write [..., H] fp32, in x's dtype."""
    return (x.float() * write.unsqueeze(-1)).to(x.dtype)


def likelihood_precision(logits: Tensor, b_scale: Tensor, write: Tensor) -> Tensor:
    """beta of logits [..., H, V], b_scale [H] fp32 and write [..., H] fp32, in the logits' dtype."""
    return (torch.sigmoid(logits.float()) * (F.softplus(b_scale) * write).unsqueeze(-1)).to(logits.dtype)


def add_skip(y: Tensor, x: Tensor, D: Tensor) -> Tensor:
    """y + D * x, both [..., H, V] in one dtype, D [H] fp32; rounded to y's dtype at the end."""
    return torch.addcmul(y.float(), x.float(), D.unsqueeze(-1)).to(y.dtype)
