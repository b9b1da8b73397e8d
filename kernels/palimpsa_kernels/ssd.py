"""Mamba2's scan (SSD) in PyTorch: matrix products inside chunks, states passed from chunk to chunk.

With c_t the sum of log_alpha up to t inside a chunk, S the state before it and R = H / G heads in a group:

    y_t   = scale * (sum_{s <= t} exp(c_t - c_s) (q_t . k_s) v_s + exp(c_t) S q_t)
    S_end = exp(c_L) S + sum_s exp(c_L - c_s) outer(v_s, k_s)

Differences of c are formed in float64 and masked before exp, so that they are never positive and nothing is divided.

Shapes: n chunks, L tokens of a chunk, G groups, R heads of a group, K and V as everywhere.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from palimpsa_kernels.packing import Chunks
from palimpsa_kernels.precision import without_autocast

CHUNK_SIZE = 32


def _decays(log_alpha_nlgr: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """exp(c_t - c_s) for s <= t, else 0, [n, G, R, L, L]; exp(c_t) and exp(c_L - c_t) [n, G, R, L]."""
    c = log_alpha_nlgr.double().cumsum(1).permute(0, 2, 3, 1)
    length = c.shape[-1]
    future = torch.ones(length, length, dtype=torch.bool, device=c.device).triu(1)
    dtype = log_alpha_nlgr.dtype
    between = (c[..., :, None] - c[..., None, :]).to(dtype).masked_fill_(future, -torch.inf).exp_()
    return between, c.to(dtype).exp(), (c[..., -1:] - c).to(dtype).exp()


class _ChunkSSD(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, initial: Tensor, scale: float, chunks: Chunks
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v, log_alpha, initial)
        ctx.scale, ctx.chunks = scale, chunks
        groups = k.shape[2]
        q_ngLK, k_ngLK, v_ngrLV, log_alpha_nlgr = _by_group(chunks, q, k, v, log_alpha)
        between, from_start, to_end = _decays(log_alpha_nlgr)
        local = (v_ngrLV * to_end[..., None]).mT @ k_ngLK[:, :, None]
        decay, final = from_start[..., -1, None, None], initial.clone()
        before, _ = chunks.pass_states(local.flatten(1, 2), decay.flatten(1, 2), initial, final)
        before = before.unflatten(1, (groups, -1))
        scores = (q_ngLK @ k_ngLK.mT)[:, :, None] * between
        y = scores @ v_ngrLV
        y += (q_ngLK[:, :, None] @ before.mT) * from_start[..., None]
        return chunks.merge(_to_tokens(y * scale), v.dtype), final

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy, dfinal = grads
        q, k, v, log_alpha, initial = ctx.saved_tensors
        chunks: Chunks = ctx.chunks
        groups = k.shape[2]
        q_ngLK, k_ngLK, v_ngrLV, log_alpha_nlgr = _by_group(chunks, q, k, v, log_alpha)
        dy_ngrLV = _heads_first(chunks.split(dy), groups) * ctx.scale
        between, from_start, to_end = _decays(log_alpha_nlgr)
        decay = from_start[..., -1, None, None]
        keys, queries = k_ngLK[:, :, None], q_ngLK[:, :, None]

        local = (v_ngrLV * to_end[..., None]).mT @ keys
        before, _ = chunks.pass_states(local.flatten(1, 2), decay.flatten(1, 2), initial, None)
        before = before.unflatten(1, (groups, -1))
        dy_decayed, dinitial = dy_ngrLV * from_start[..., None], dfinal.clone()
        dbefore = (dy_decayed.mT @ queries).flatten(1, 2)
        dbehind, _ = chunks.pass_adjoints(dbefore, decay.flatten(1, 2), dfinal, dinitial)
        dbehind = dbehind.unflatten(1, (groups, -1))

        scores = (q_ngLK @ k_ngLK.mT)[:, :, None] * between
        dv_from_behind = (keys @ dbehind.mT) * to_end[..., None]
        dv = scores.mT @ dy_ngrLV + dv_from_behind
        dscores = dy_ngrLV @ v_ngrLV.mT
        dproducts = (dscores * between).sum(2)
        dq = dproducts @ k_ngLK + (dy_decayed @ before).sum(2)
        dk = dproducts.mT @ q_ngLK + ((v_ngrLV * to_end[..., None]) @ dbehind).sum(2)

        dlog_alpha = _across(dscores.mul_(scores))
        from_before = ((dy_decayed @ before) * queries).sum(-1)
        dlog_alpha += from_before.flip(-1).cumsum(-1).flip(-1)
        to_behind = (v_ngrLV * dv_from_behind).sum(-1)
        dlog_alpha[..., 1:] += to_behind.cumsum(-1)[..., :-1]
        dlog_alpha += (decay * dbehind * before).sum((-2, -1))[..., None]
        return (
            chunks.merge(dq.transpose(1, 2), q.dtype),
            chunks.merge(dk.transpose(1, 2), k.dtype),
            chunks.merge(_to_tokens(dv), v.dtype),
            chunks.merge(dlog_alpha.permute(0, 3, 1, 2).flatten(2), log_alpha.dtype),
            dinitial,
            None,
            None,
        )


def _by_group(chunks: Chunks, q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor) -> tuple[Tensor, ...]:
    """q, k [n, G, L, K], v [n, G, R, L, V], log_alpha [n, L, G, R]."""
    groups = k.shape[2]
    q_ngLK, k_ngLK = (chunks.split(x).transpose(1, 2) for x in (q, k))
    return (
        q_ngLK,
        k_ngLK,
        _heads_first(chunks.split(v), groups),
        chunks.split(log_alpha).unflatten(2, (groups, -1)),
    )


def _heads_first(x: Tensor, groups: int) -> Tensor:
    """[n, L, H, V] to [n, G, R, L, V]."""
    return x.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).contiguous()


def _to_tokens(x: Tensor) -> Tensor:
    """[n, G, R, L, V] to [n, L, H, V]."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _across(weights: Tensor) -> Tensor:
    """Sum of weights[t, s] over all pairs s < u <= t, for each u: [..., L, L] to [..., L].

    These are the pairs whose decay contains log_alpha_u. Only they are added, none is subtracted again, so that the
    result is exact to rounding however strong the decay is.
    """
    length = weights.shape[-1]
    ones = torch.ones(length, length, dtype=weights.dtype, device=weights.device)
    return (weights @ ones.triu(1)).mul_(ones.tril()).sum(-2)


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
    batch, tokens, heads, value_dim = v.shape
    chunks = Chunks(batch, tokens, cu_seqlens, CHUNK_SIZE, v.device)
    if initial_state is None:
        initial_state = log_alpha.new_zeros(chunks.documents, heads, value_dim, k.shape[3])
    y, final = _ChunkSSD.apply(q, k, v, log_alpha, initial_state, scale, chunks)
    return (y, final) if output_final_state else y
