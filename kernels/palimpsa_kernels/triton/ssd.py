"""Mamba2's scan (SSD): chunk states and their passing as in Palimpsa, matrix products inside of chunks.

With c_t the log-decay from a chunk's start up to and with t and M_0 the state before the chunk:

    y_t = scale * (sum_{s <= t} exp(c_t - c_s) (q_t . k_s) v_s + exp(c_t) M_0 q_t)

Programs take a chunk and several heads of a group, so that q . k and the gradients to q and k inside of the chunk are
formed once for all of them.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from palimpsa_kernels.carry import Carry
from palimpsa_kernels.triton.chunks import make_chunks
from palimpsa_kernels.triton.decay import chunk_decays
from palimpsa_kernels.triton.incoming import add_incoming, decay_gradient, launch_incoming
from palimpsa_kernels.triton.launches import next_power_of_2, tokens_adjacent
from palimpsa_kernels.triton.primitives import chunk_bounds, chunk_document, matrix_dtype
from palimpsa_kernels.triton.states import (
    chunk_states,
    hand_back,
    pass_adjoints,
    pass_states,
    take_over,
    to_internal,
    to_public,
)
from palimpsa_kernels.triton.targets import capability, ssd_block_v, ssd_gradient_options

CHUNK = 64
MAX_SPLITS = 8


@triton.jit
def chunk_tile(pointer, i, length, stride, offs, width):
    """Rows of a chunk whose first token is at `pointer`; offsets inside of a chunk are 32 bits wide."""
    at = pointer + i[:, None] * stride + offs[None, :]
    return tl.load(at, mask=(i < length)[:, None] & (offs < width)[None, :], other=0.0)


@triton.jit
def chunk_log_decay(log_alpha, i, length, H, SUM: tl.constexpr):
    """c_t in SUM: differences of it must not be rounded by strong decays before them."""
    return tl.cumsum(tl.load(log_alpha + i * H, mask=i < length, other=0.0).to(SUM), 0)


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
    length = (end - start).to(tl.int32)
    if length > 0:
        i = tl.arange(0, BLOCK_T)
        offs_k = tl.arange(0, BLOCK_K)
        heads_per_group = H // G
        query = chunk_tile(q + start * stride_q + group * K, i, length, stride_q, offs_k, K).to(OPERAND)
        key = chunk_tile(k + start * stride_k + group * K, i, length, stride_k, offs_k, K).to(OPERAND)
        scores = tl.dot(query, tl.trans(key), input_precision="tf32x3")
        v += start * stride_v
        y += start * H * V
        log_alpha += start * H
        for h in range(tl.program_id(1) % splits, heads_per_group, splits):
            head = group * heads_per_group + h
            c = chunk_log_decay(log_alpha + head, i, length, H, SUM)
            past = (i[:, None] >= i[None, :]) & (i < length)[:, None]
            between = tl.where(past, (c[:, None] - c[None, :]).to(tl.float32), -float("inf"))
            weights = (scores * tl.exp(between)).to(OPERAND)
            decay = tl.exp(c.to(tl.float32))[:, None]
            for base_v in range(0, V, BLOCK_V):
                offs_v = base_v + tl.arange(0, BLOCK_V)
                mask = (offs_k < K)[:, None] & (offs_v < V)[None, :]
                within = head * K * V + offs_k[:, None] * V + offs_v[None, :]
                before = tl.load(
                    states + (chunk - 1) * H * K * V + within, mask=mask & (first == 0), other=0.0
                ).to(tl.float32)  # fmt: skip
                if HAS_INITIAL:
                    given = initial + document * H * K * V + within
                    before += tl.load(given, mask=mask & (first == 1), other=0.0)
                out = tl.dot(query, before.to(OPERAND), input_precision="tf32x3") * decay
                value = chunk_tile(v + head * V, i, length, stride_v, offs_v, V).to(OPERAND)
                out = tl.dot(weights, value, out, input_precision="tf32x3") * scale
                at = (y + head * V) + i[:, None] * (H * V) + offs_v[None, :]
                tl.store(at, out.to(y.dtype.element_ty), mask=(i < length)[:, None] & (offs_v < V)[None, :])


@triton.jit(do_not_specialize=["splits"])
def ssd_gradient_kernel(
    q, k, v, dy, log_alpha, table, triangle, d_scores_parts, dv, dlog_alpha, splits, H, G,
    stride_q, stride_k, stride_v, stride_dy,
    K: tl.constexpr, V: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, SUM: tl.constexpr, TRIANGLE: tl.constexpr,
):  # fmt: skip
    # Matrices of pairs of tokens hold keys in rows and queries in columns, so that the weights need no transposition.
    chunk = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) // splits
    split = tl.program_id(1) % splits
    start, end = chunk_bounds(table, chunk)
    length = (end - start).to(tl.int32)
    if length > 0:
        i = tl.arange(0, BLOCK_T)
        inside = i < length
        offs_k = tl.arange(0, BLOCK_K)
        heads_per_group = H // G
        first_head = group * heads_per_group
        v += start * stride_v + first_head * V
        dy += start * stride_dy + first_head * V
        dv += (start * H + first_head) * V
        log_alpha += start * H + first_head
        dlog_alpha += start * H + first_head
        query = chunk_tile(q + start * stride_q + group * K, i, length, stride_q, offs_k, K).to(OPERAND)
        key = chunk_tile(k + start * stride_k + group * K, i, length, stride_k, offs_k, K).to(OPERAND)
        scores = tl.dot(key, tl.trans(query), input_precision="tf32x3")
        d_scores = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
        # On a Hopper what is loaded becomes an operand in shared memory, what is formed one in registers.
        if TRIANGLE:
            before = tl.load(triangle + i[:, None] * BLOCK_T + i[None, :])
        else:
            before = (i[None, :] < i[:, None]).to(OPERAND)
        for h in range(split, heads_per_group, splits):
            c = chunk_log_decay(log_alpha + h, i, length, H, SUM)
            past = i[:, None] <= i[None, :]
            decay = tl.exp(tl.where(past, (c[None, :] - c[:, None]).to(tl.float32), -float("inf")))
            d_weights = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
            for base_v in range(0, V, BLOCK_V):
                offs_v = base_v + tl.arange(0, BLOCK_V)
                value = chunk_tile(v + h * V, i, length, stride_v, offs_v, V).to(OPERAND)
                d_out = chunk_tile(dy + h * V, i, length, stride_dy, offs_v, V).to(OPERAND)
                d_weights = tl.dot(value, tl.trans(d_out), d_weights, input_precision="tf32x3")
            weights = (scores * decay).to(OPERAND)
            d_weights *= decay
            d_scores += d_weights
            # log_alpha_u acts on every pair s < u <= t: sums of those terms only, nothing cancels.
            terms = d_weights * scores
            high = terms.to(OPERAND)
            crossing = tl.dot(before, high, input_precision="tf32x3")
            if tl.float32 != OPERAND:
                crossing = tl.dot(before, (terms - high.to(tl.float32)).to(OPERAND), crossing)
            crossing = tl.where(past, crossing, 0.0)
            tl.store(dlog_alpha + i * H + h, tl.sum(crossing, axis=1), mask=inside)
            # Behind the rest, with dy loaded again: fewer registers at a time.
            for base_v in range(0, V, BLOCK_V):
                offs_v = base_v + tl.arange(0, BLOCK_V)
                d_out = chunk_tile(dy + h * V, i, length, stride_dy, offs_v, V).to(OPERAND)
                dv_tile = tl.dot(weights, d_out, input_precision="tf32x3")
                at = (dv + h * V) + i[:, None] * (H * V) + offs_v[None, :]
                tl.store(at, dv_tile.to(dv.dtype.element_ty), mask=inside[:, None] & (offs_v < V)[None, :])
        parts = d_scores_parts + ((chunk * G + group) * splits + split) * BLOCK_T * BLOCK_T
        tl.store(parts + i[:, None] * BLOCK_T + i[None, :], d_scores)


@triton.jit(do_not_specialize=["tokens", "splits"])
def ssd_query_key_gradient_kernel(
    q, k, table, d_scores_parts, dq_parts, dk_parts, dq, dk, tokens, splits, G, stride_q, stride_k,
    K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Sum the parts: those inside of the chunk as pairs of tokens, those from outside as rows."""
    chunk = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    start, end = chunk_bounds(table, chunk)
    length = (end - start).to(tl.int32)
    if length > 0:
        i = tl.arange(0, BLOCK_T)
        offs_k = tl.arange(0, BLOCK_K)
        mask = (i < length)[:, None] & (offs_k < K)[None, :]
        d_scores = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
        pairs = d_scores_parts + (chunk * G + group) * splits * BLOCK_T * BLOCK_T
        for split in range(0, splits):
            d_scores += tl.load((pairs + split * BLOCK_T * BLOCK_T) + i[:, None] * BLOCK_T + i[None, :])
        d_scores_operand = d_scores.to(OPERAND)
        row = (start * G + group) * K + i[:, None] * (G * K) + offs_k[None, :]
        part_size = tokens.to(tl.int64) * G * K
        query = chunk_tile(q + start * stride_q + group * K, i, length, stride_q, offs_k, K).to(OPERAND)
        gradient = tl.dot(d_scores_operand, query, input_precision="tf32x3")
        for split in range(0, splits):
            gradient += tl.load(dk_parts + split * part_size + row, mask=mask, other=0.0)
        tl.store(dk + row, gradient.to(dk.dtype.element_ty), mask=mask)
        key = chunk_tile(k + start * stride_k + group * K, i, length, stride_k, offs_k, K).to(OPERAND)
        gradient = tl.dot(tl.trans(d_scores_operand), key, input_precision="tf32x3")
        for split in range(0, splits):
            gradient += tl.load(dq_parts + split * part_size + row, mask=mask, other=0.0)
        tl.store(dq + row, gradient.to(dq.dtype.element_ty), mask=mask)


@functools.cache
def strictly_lower(device: torch.device, dtype: torch.dtype) -> Tensor:
    """1 below the diagonal, else 0 [CHUNK, CHUNK]."""
    return torch.ones(CHUNK, CHUNK, device=device, dtype=dtype).tril(-1)


def launch_options(q: Tensor, v: Tensor) -> dict[str, Any]:
    """Compile-time arguments of the readout and the gradient kernel but for `num_warps`."""
    block_k = max(16, next_power_of_2(q.shape[3]))
    return {
        "K": q.shape[3],
        "V": v.shape[3],
        "BLOCK_T": CHUNK,
        "BLOCK_K": block_k,
        "BLOCK_V": ssd_block_v(block_k, v.shape[3], v.dtype),
        "OPERAND": matrix_dtype(v.dtype),
        "SUM": tl.float32 if v.dtype == torch.bfloat16 else tl.float64,
        "num_stages": 2,
    }


class ChunkSSD(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, initial_mean: Tensor | None,
        cu_seqlens: Tensor | None, scale: float, output_final_state: bool, carry: Carry | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        batch, tokens, heads, value_dim = v.shape
        groups = k.shape[2]
        q, k, v = (tokens_adjacent(x) for x in (q, k, v))
        log_alpha = log_alpha.contiguous()
        goes_on = carry is not None and carry.goes_on
        chunks = make_chunks(batch, tokens, cu_seqlens, CHUNK, q.device, goes_on=goes_on)
        initial = None if initial_mean is None else to_internal((initial_mean,))
        final = None
        if output_final_state:
            final = torch.empty(chunks.documents, 1, heads, k.shape[3], value_dim, device=q.device)
        to_end, total = chunk_decays(log_alpha, chunks)
        # Products with bf16 inputs take the states in bf16 anyway.
        dtype = torch.bfloat16 if v.dtype == torch.bfloat16 else torch.float32
        states = chunk_states(k, v, None, to_end, chunks, dtype)
        carried = None if carry is None else take_over(carry, states, total, chunks)
        pass_states(states, total, chunks, initial if carry is None else carried, final)
        y = (torch.empty if cu_seqlens is None else torch.zeros)(v.shape, device=v.device, dtype=v.dtype)
        splits = min(MAX_SPLITS, heads // groups)
        ssd_readout_kernel[(chunks.places, groups * splits)](
            q, k, v, log_alpha, chunks.table, states, states if initial is None else initial, y, scale,
            splits, heads, groups, q.stride(1), k.stride(1), v.stride(1),
            HAS_INITIAL=initial is not None, num_warps=4, **launch_options(q, v),
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, log_alpha, states, initial, carried)
        ctx.chunks, ctx.scale, ctx.packed, ctx.carry = chunks, scale, cu_seqlens is not None, carry
        ctx.set_materialize_grads(False)
        return y, None if final is None else to_public(final)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, log_alpha, states, initial, carried = ctx.saved_tensors
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
        if ctx.carry is not None:
            final_adjoint = hand_back(ctx.carry, adjoints, total, chunks, final_adjoint)
        initial_adjoint, products = pass_adjoints(
            adjoints, states, total, chunks, initial if ctx.carry is None else carried, final_adjoint
        )
        splits = min(MAX_SPLITS, heads // groups)
        # Tokens behind the last document belong to no chunk.
        new = torch.zeros if ctx.packed else torch.empty
        dq, dk, dv = (new(x.shape, device=x.device, dtype=x.dtype) for x in (q, k, v))
        d_scores_parts = total.new_empty(chunks.places, groups, splits, CHUNK, CHUNK)
        dlog_alpha = torch.empty_like(log_alpha)
        options = launch_options(q, v)
        operand_dtype = torch.bfloat16 if v.dtype == torch.bfloat16 else torch.float32
        ssd_gradient_kernel[(chunks.places, groups * splits)](
            q, k, v, dy, log_alpha, chunks.table, strictly_lower(v.device, operand_dtype), d_scores_parts, dv,
            dlog_alpha, splits, heads, groups, q.stride(1), k.stride(1), v.stride(1), dy.stride(1),
            **options | ssd_gradient_options(capability(v.device), options["BLOCK_V"]),
        )  # fmt: skip
        dq_parts, dk_parts = total.new_empty(2, 1, splits, batch, tokens, groups, key_dim)
        (dv,), inner = add_incoming(k, [v], to_end, chunks, adjoints, [dv[:, :, :, None]], dk_parts)
        outer = torch.empty_like(log_alpha)
        launch_incoming(
            q, dy, from_start, chunks, states, initial, dv, dv, dq_parts[0], outer, kind=0, before=True
        )  # fmt: skip
        dlog_alpha = decay_gradient(dlog_alpha[..., None], products, inner, chunks, outer)
        ssd_query_key_gradient_kernel[(chunks.places, groups)](
            q, k, chunks.table, d_scores_parts, dq_parts, dk_parts, dq, dk, batch * tokens, splits, groups,
            q.stride(1), k.stride(1),
            K=key_dim, BLOCK_T=CHUNK, BLOCK_K=options["BLOCK_K"], OPERAND=options["OPERAND"], num_stages=2,
            num_warps=4 if key_dim <= 128 else 8,
        )  # fmt: skip
        d_initial = None if initial is None else to_public(initial_adjoint)[0]
        return dq, dk, dv, dlog_alpha, d_initial, None, None, None, None


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
