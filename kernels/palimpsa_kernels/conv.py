"""Depthwise causal convolution in PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from palimpsa_kernels.reference import causal_conv1d_reference


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None = "silu",
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `palimpsa_kernels.causal_conv1d`."""
    y, state = causal_conv1d_reference(
        x, weight, bias, activation=activation, initial_state=initial_state, cu_seqlens=cu_seqlens
    )
    return (y.to(x.dtype), state.to(x.dtype)) if output_final_state else y.to(x.dtype)


@torch.no_grad()
def causal_conv1d_step(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str | None = "silu"
) -> Tensor:
    """See `palimpsa_kernels.causal_conv1d_step`."""
    window = torch.cat([state.float(), x.float()[..., None]], -1)
    state.copy_(window[..., 1:])
    y = (window * weight.float()).sum(-1)
    if bias is not None:
        y = y + bias.float()
    return (F.silu(y) if activation == "silu" else y).to(x.dtype)
