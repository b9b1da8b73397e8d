"""Palimpsa's scan in PyTorch."""

import torch
from torch import Tensor

from palimpsa_kernels.reference import palimpsa_reference


def chunk_palimpsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_alpha: Tensor,
    prior: Tensor,
    *,
    scale: float = 1.0,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor]]:
    """See `palimpsa_kernels.chunk_palimpsa`."""
    y, (mean, importance) = palimpsa_reference(
        q, k, v, beta, log_alpha, prior, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens
    )
    y = y.to(v.dtype)
    return (y, (mean.float(), importance.float())) if output_final_state else y


@torch.no_grad()
def palimpsa_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_alpha: Tensor,
    prior: Tensor,
    states: tuple[Tensor, Tensor],
    *,
    scale: float = 1.0,
) -> Tensor:
    """See `palimpsa_kernels.palimpsa_step`."""
    mean, importance = states
    heads_per_group = v.shape[1] // k.shape[1]
    query, key = (x.float().repeat_interleave(heads_per_group, 1)[:, :, None, :] for x in (q, k))
    alpha = log_alpha.exp()[:, :, None, None]
    mean.mul_(alpha).addcmul_(v.float()[..., None], key)
    importance.mul_(alpha).addcmul_(beta.float()[..., None], key * key)
    y = scale * (mean / (prior[:, None, None] + importance) * query).sum(-1)
    return y.to(v.dtype)
