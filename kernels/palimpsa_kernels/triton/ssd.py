"""Mamba2's scan (SSD): chunk states and their passing as in Palimpsa, matrix products inside of chunks.

With c_t the log-decay from a chunk's start up to and with t and M_0 the state before the chunk:

    y_t = scale * (sum_{s <= t} exp(c_t - c_s) (q_t . k_s) v_s + exp(c_t) M_0 q_t)

Programs take a chunk and several heads of a group, so that q . k and the gradients to q and k inside of the chunk are
formed once for all of them.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from palimpsa_kernels.triton.chunks import make_chunks
from palimpsa_kernels.triton.decay import chunk_decays
from palimpsa_kernels.triton.incoming import add_incoming, decay_gradient, launch_incoming
from palimpsa_kernels.triton.palimpsa import tokens_adjacent
from palimpsa_kernels.triton.primitives import chunk_bounds, chunk_document, matrix_dtype
from palimpsa_kernels.triton.states import chunk_states, pass_adjoints, pass_states, to_internal, to_public

CHUNK = 64
MAX_SPLITS = 8


@triton.jit
def chunk_tile(pointer, t, inside, stride, head, offs, width):
    at = t[:, None] * stride + head * width + offs[None, :]
    return tl.load(pointer + at, mask=inside[:, None] & (offs < width)[None, :], other=0.0)


@triton.jit
def decay_matrix(log_alpha, t, inside, head, H, SUM: tl.constexpr):
    """exp(c_t - c_s) for s <= t, else 0; and c. Differences in SUM, so that strong decays before do not round them."""
    step = tl.load(log_alpha + t * H + head, mask=inside, other=0.0).to(SUM)
    c = tl.cumsum(step, 0)
    past = (t[:, None] >= t[None, :]) & inside[:, None]
    between = tl.where(past, (c[:, None] - c[None, :]).to(tl.float32), -float("inf"))
    return tl.exp(between), c.to(tl.float32)


@triton.jit(do_not_specialize=["splits"])
def ssd_readout_kernel(
    q, k, v, log_alpha, table, states, initial, y, scale, splits, H, G, stride_q, stride_k, stride_v,
    K: tl.constexpr, V: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    HAS_INITIAL: tl.constexpr, OPERAND: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) // splits
    start, end = chunk_bounds(table, chunk)
    document, first = chunk_document(table, chunk)
    if start < end:
        t = start + tl.arange(0, BLOCK_T)
        inside = t < end
        offs_k = tl.arange(0, BLOCK_K)
        query = chunk_tile(q, t, inside, stride_q, group, offs_k, K).to(OPERAND)
        key = chunk_tile(k, t, inside, stride_k, group, offs_k, K).to(OPERAND)
        scores = tl.dot(query, tl.trans(key), input_precision="tf32x3")
        heads_per_group = H // G
        for h in range(tl.program_id(1) % splits, heads_per_group, splits):
            head = group * heads_per_group + h
            decay, c = decay_matrix(log_alpha, t, inside, head, H, SUM)
            weights = (scores * decay).to(OPERAND)
            for base_v in range(0, V, BLOCK_V):
                offs_v = base_v + tl.arange(0, BLOCK_V)
                mask = (offs_k < K)[:, None] & (offs_v < V)[None, :]
                within = head * K * V + offs_k[:, None] * V + offs_v[None, :]
                before = tl.load(states + (chunk - 1) * H * K * V + within, mask=mask & (first == 0), other=0.0).to(
                    tl.float32
                )
                if HAS_INITIAL:
                    before += tl.load(
                        initial + document * H * K * V + within, mask=mask & (first == 1), other=0.0
                    )  # fmt: skip
                out = tl.dot(query, before.to(OPERAND), input_precision="tf32x3") * tl.exp(c)[:, None]
                value = chunk_tile(v, t, inside, stride_v, head, offs_v, V).to(OPERAND)
                out = tl.dot(weights, value, out, input_precision="tf32x3") * scale
                at = (t[:, None] * H + head) * V + offs_v[None, :]
                tl.store(y + at, out.to(y.dtype.element_ty), mask=inside[:, None] & (offs_v < V)[None, :])


@triton.jit(do_not_specialize=["tokens", "splits"])
def ssd_gradient_kernel(
    q, k, v, dy, log_alpha, table, dq_parts, dk_parts, dv, dlog_alpha, tokens, splits, H, G,
    stride_q, stride_k, stride_v, stride_dy,
    K: tl.constexpr, V: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) // splits
    split = tl.program_id(1) % splits
    start, end = chunk_bounds(table, chunk)
    if start < end:
        t = start + tl.arange(0, BLOCK_T)
        inside = t < end
        offs_k = tl.arange(0, BLOCK_K)
        query = chunk_tile(q, t, inside, stride_q, group, offs_k, K).to(OPERAND)
        key = chunk_tile(k, t, inside, stride_k, group, offs_k, K).to(OPERAND)
        scores = tl.dot(query, tl.trans(key), input_precision="tf32x3")
        d_scores = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
        ahead = (t[:, None] < t[None, :]).to(OPERAND)
        heads_per_group = H // G
        for h in range(split, heads_per_group, splits):
            head = group * heads_per_group + h
            decay, _c = decay_matrix(log_alpha, t, inside, head, H, SUM)
            weights = tl.trans((scores * decay).to(OPERAND))
            d_weights = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
            for base_v in range(0, V, BLOCK_V):
                offs_v = base_v + tl.arange(0, BLOCK_V)
                value = chunk_tile(v, t, inside, stride_v, head, offs_v, V).to(OPERAND)
                d_out = chunk_tile(dy, t, inside, stride_dy, head, offs_v, V).to(OPERAND)
                d_weights = tl.dot(d_out, tl.trans(value), d_weights, input_precision="tf32x3")
                dv_tile = tl.dot(weights, d_out, input_precision="tf32x3")
                at = (t[:, None] * H + head) * V + offs_v[None, :]
                tl.store(dv + at, dv_tile.to(dv.dtype.element_ty), mask=inside[:, None] & (offs_v < V)[None, :])
            d_weights *= decay
            d_scores += d_weights
            # log_alpha_t acts on every pair (i, s) with s < t <= i: sums of those terms only, nothing cancels.
            terms = d_weights * scores
            high = terms.to(OPERAND)
            crossing = tl.dot(high, ahead, input_precision="tf32x3")
            if tl.float32 != OPERAND:
                crossing = tl.dot((terms - high.to(tl.float32)).to(OPERAND), ahead, crossing)
            crossing = tl.where(t[:, None] >= t[None, :], crossing, 0.0)
            tl.store(dlog_alpha + t * H + head, tl.sum(crossing, axis=0), mask=inside)
        d_scores_operand = d_scores.to(OPERAND)
        at = ((split.to(tl.int64) * tokens + t[:, None]) * G + group) * K + offs_k[None, :]
        mask = inside[:, None] & (offs_k < K)[None, :]
        tl.store(dq_parts + at, tl.dot(d_scores_operand, key, input_precision="tf32x3"), mask=mask)
        tl.store(dk_parts + at, tl.dot(tl.trans(d_scores_operand), query, input_precision="tf32x3"), mask=mask)


def launch_options(q: Tensor, v: Tensor) -> dict[str, Any]:
    """Compile-time arguments of the two kernels above."""
    return {
        "K": q.shape[3],
        "V": v.shape[3],
        "BLOCK_T": CHUNK,
        "BLOCK_K": max(16, triton.next_power_of_2(q.shape[3])),
        "BLOCK_V": max(16, min(64, triton.next_power_of_2(v.shape[3]))),
        "OPERAND": matrix_dtype(v.dtype),
        "SUM": tl.float32 if v.dtype == torch.bfloat16 else tl.float64,
        "num_warps": 4,
        "num_stages": 2,
    }


class ChunkSSD(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, initial_mean: Tensor | None,
        cu_seqlens: Tensor | None, scale: float, output_final_state: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        batch, tokens, heads, value_dim = v.shape
        groups = k.shape[2]
        q, k, v = (tokens_adjacent(x) for x in (q, k, v))
        log_alpha = log_alpha.contiguous()
        chunks = make_chunks(batch, tokens, cu_seqlens, CHUNK, q.device)
        initial = None if initial_mean is None else to_internal((initial_mean,))
        final = None
        if output_final_state:
            final = torch.empty(chunks.documents, 1, heads, k.shape[3], value_dim, device=q.device)
        to_end, total = chunk_decays(log_alpha, chunks)
        # Products with bf16 inputs take the states in bf16 anyway.
        dtype = torch.bfloat16 if v.dtype == torch.bfloat16 else torch.float32
        states = chunk_states(k, v, None, to_end, chunks, dtype)
        pass_states(states, total, chunks, initial, final)
        y = (torch.empty if cu_seqlens is None else torch.zeros)(v.shape, device=v.device, dtype=v.dtype)
        splits = min(MAX_SPLITS, heads // groups)
        ssd_readout_kernel[(chunks.places, groups * splits)](
            q, k, v, log_alpha, chunks.table, states, states if initial is None else initial, y, scale,
            splits, heads, groups, q.stride(1), k.stride(1), v.stride(1),
            HAS_INITIAL=initial is not None, **launch_options(q, v),
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, log_alpha, states, initial)
        ctx.chunks, ctx.scale = chunks, scale
        ctx.set_materialize_grads(False)
        return y, None if final is None else to_public(final)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, log_alpha, states, initial = ctx.saved_tensors
        chunks = ctx.chunks
        batch, tokens, groups, key_dim = k.shape
        heads = v.shape[2]
        dy = torch.zeros_like(v) if grads[0] is None else tokens_adjacent(grads[0])
        if ctx.scale != 1.0:
            dy = dy * ctx.scale
        final_adjoint = None if grads[1] is None else to_internal((grads[1],))

        from_start = torch.empty_like(log_alpha)
        to_end, total = chunk_decays(log_alpha, chunks, from_start=from_start)
        adjoints = chunk_states(q, dy, None, from_start, chunks)
        initial_adjoint, products = pass_adjoints(adjoints, states, total, chunks, initial, final_adjoint)
        splits = min(MAX_SPLITS, heads // groups)
        dq_parts = total.new_zeros(2, splits, batch, tokens, groups, key_dim)
        dk_parts = torch.zeros_like(dq_parts)
        dv = torch.zeros(v.shape, device=v.device, dtype=v.dtype)
        dlog_alpha = torch.empty_like(log_alpha)
        ssd_gradient_kernel[(chunks.places, groups * splits)](
            q, k, v, dy, log_alpha, chunks.table, dq_parts[0], dk_parts[0], dv, dlog_alpha, batch * tokens, splits,
            heads, groups, q.stride(1), k.stride(1), v.stride(1), dy.stride(1), **launch_options(q, v),
        )  # fmt: skip
        (dv,), inner = add_incoming(k, [v], to_end, chunks, adjoints, [dv[:, :, :, None]], dk_parts[1:])
        outer = torch.empty_like(log_alpha)
        launch_incoming(
            q, dy, from_start, chunks, states, initial, dv, dv, dq_parts[1], outer, kind=0, before=True
        )  # fmt: skip
        dlog_alpha = decay_gradient(dlog_alpha[..., None], products, inner, chunks, outer)
        dq, dk = (parts.sum((0, 1)).to(q.dtype) for parts in (dq_parts, dk_parts))
        d_initial = None if initial is None else to_public(initial_adjoint)[0]
        return dq, dk, dv, dlog_alpha, d_initial, None, None, None


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
    y, state = ChunkSSD.apply(q, k, v, log_alpha, initial_state, cu_seqlens, scale, output_final_state)
    return (y, state) if output_final_state else y
