"""One token of either scan for decoding: reads and writes each state once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from palimpsa_kernels.triton.launches import cdiv, next_power_of_2
from palimpsa_kernels.triton.primitives import fast_reciprocal

ELEMENTS = 1024  # of one state a program


@triton.jit
def step_kernel(
    q, k, v, beta, log_alpha, prior, mean, importance, y, scale, H, heads_per_group,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, IMPORTANCE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = row % H
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside_k = offs_k < K
    inside_v = offs_v < V
    inside = inside_v[:, None] & inside_k[None, :]
    tile = row * K * V + offs_v[:, None] * K + offs_k[None, :]
    group = (row // H) * (H // heads_per_group) + head // heads_per_group
    key = tl.load(k + group * K + offs_k, mask=inside_k, other=0.0).to(tl.float32)
    query = tl.load(q + group * K + offs_k, mask=inside_k, other=0.0).to(tl.float32)
    value = tl.load(v + row * V + offs_v, mask=inside_v, other=0.0).to(tl.float32)
    alpha = tl.exp(tl.load(log_alpha + row))
    state = tl.load(mean + tile, mask=inside, other=0.0) * alpha + value[:, None] * key[None, :]
    tl.store(mean + tile, state, mask=inside)
    if IMPORTANCE:
        precision = tl.load(beta + row * V + offs_v, mask=inside_v, other=0.0).to(tl.float32)
        evidence = tl.load(importance + tile, mask=inside, other=0.0) * alpha
        evidence += precision[:, None] * (key * key)[None, :]
        tl.store(importance + tile, evidence, mask=inside)
        state *= fast_reciprocal(evidence + tl.load(prior + head))
    out = tl.sum(state * query[None, :], axis=1) * scale
    tl.store(y + row * V + offs_v, out.to(y.dtype.element_ty), mask=inside_v)


def launch_step(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, log_alpha: Tensor, prior: Tensor | None,
    states: tuple[Tensor, ...], scale: float,
) -> Tensor:  # fmt: skip
    """Update M and, with beta and prior, Ibar in place."""
    batch, heads, value_dim = v.shape
    groups, key_dim = k.shape[1:]
    q, k, v, log_alpha = (x.contiguous() for x in (q, k, v, log_alpha))
    y = torch.empty_like(v)
    block_k = next_power_of_2(key_dim)
    block_v = max(1, min(ELEMENTS // block_k, next_power_of_2(value_dim)))
    dense = [state.contiguous() for state in states]
    step_kernel[(batch * heads, cdiv(value_dim, block_v))](
        q, k, v, v if beta is None else beta.contiguous(), log_alpha, log_alpha if prior is None else prior,
        dense[0], dense[-1], y, scale, heads, heads // groups,
        K=key_dim, V=value_dim, BLOCK_K=block_k, BLOCK_V=block_v, IMPORTANCE=beta is not None, num_warps=4,
    )  # fmt: skip
    for state, updated in zip(states, dense, strict=True):
        if updated is not state:
            state.copy_(updated)
    return y


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
    return launch_step(q, k, v, beta, log_alpha, prior, states, scale)


def ssd_step(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, state: Tensor, *, scale: float = 1.0) -> Tensor:
    """See `palimpsa_kernels.ssd_step`."""
    return launch_step(q, k, v, None, log_alpha, None, (state,), scale)
