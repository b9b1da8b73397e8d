"""Mamba2's scan (SSD) in PyTorch."""

import torch
from torch import Tensor

from palimpsa_kernels.reference import ssd_reference


def chunk_ssd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `palimpsa_kernels.chunk_ssd`."""
    y, state = ssd_reference(q, k, v, log_alpha, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return (y.to(v.dtype), state.float()) if output_final_state else y.to(v.dtype)


@torch.no_grad()
def ssd_step(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, state: Tensor, *, scale: float = 1.0) -> Tensor:
    """See `palimpsa_kernels.ssd_step`."""
    heads_per_group = v.shape[1] // k.shape[1]
    query, key = (x.float().repeat_interleave(heads_per_group, 1)[:, :, None, :] for x in (q, k))
    state.mul_(log_alpha.exp()[:, :, None, None]).addcmul_(v.float()[..., None], key)
    return (scale * (state * query).sum(-1)).to(v.dtype)
