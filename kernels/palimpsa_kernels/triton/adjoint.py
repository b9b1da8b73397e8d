"""The elementwise part of Palimpsa's backward pass, parallel over chunks.

A program takes one piece of work after the other: it walks one chunk of one head backwards over a [BLOCK_K, BLOCK_V]
tile of the state. With zero adjoint behind
the chunk it accumulates the adjoints of the two states,

    w_t = dy_t q_t / I_t,   dM += w_t,   dIbar -= w_t M_t / I_t,

and reads every gradient off them. The state before each span or group (see `decay`) is the one at the chunk's boundary
or lies in the program's own scratch, filled by one walk forward.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from palimpsa_kernels.triton.chunks import Chunks
from palimpsa_kernels.triton.decay import GROUP, Spans
from palimpsa_kernels.triton.primitives import chunk_bounds, chunk_document, fast_reciprocal

ELEMENTS = 1024  # of one state in the registers of a program's one warp
PROGRAMS_PER_PROCESSOR = 8
STAGES = 4
DENSE_STAGES = 2
PARTS_BYTES = 1 << 30  # of the parts of dq and dk that exist at a time


@triton.jit
def load_row(pointer, i, stride, offs, mask):
    return tl.load(pointer + i * stride + offs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_boundary(boundary, given, state_size, inside, first, HAS_INITIAL: tl.constexpr):
    """The state before a chunk: behind the chunk before, the given initial state or zero."""
    mean = tl.load(boundary - 2 * state_size, mask=inside & (first == 0), other=0.0)
    importance = tl.load(boundary - state_size, mask=inside & (first == 0), other=0.0)
    if HAS_INITIAL:
        mean += tl.load(given, mask=inside & (first == 1), other=0.0)
        importance += tl.load(given + state_size, mask=inside & (first == 1), other=0.0)
    return mean, importance


@triton.jit
def accumulate(mean, importance, query, d_out, d_mean, d_importance):
    """Add a token's share to the adjoints, `importance` with the prior; also the gradient to q and Ibar's share / q."""
    reciprocal = fast_reciprocal(importance)
    weight = reciprocal * d_out[None, :]
    share = mean * weight
    dq = tl.sum(share, axis=1)
    share *= reciprocal
    return d_mean + query[:, None] * weight, d_importance - query[:, None] * share, dq, share


@triton.jit
def input_gradients(d_mean, d_importance, key, value, precision, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """Gradients to k, v and beta of one token's outer products."""
    QUAD: tl.constexpr = 4 if BLOCK_V >= 4 else BLOCK_V
    # Values of one thread are summed before the two parts are put together, and only then lanes.
    dk_mean = tl.sum(tl.reshape(d_mean * value[None, :], [BLOCK_K, BLOCK_V // QUAD, QUAD]), axis=2)
    dk_importance = tl.sum(tl.reshape(d_importance * precision[None, :], [BLOCK_K, BLOCK_V // QUAD, QUAD]), axis=2)
    dk = tl.sum(dk_mean + (2 * key)[:, None] * dk_importance, axis=1)
    dv = tl.sum(d_mean * key[:, None], axis=0)
    dbeta = tl.sum(d_importance * (key * key)[:, None], axis=0)
    return dk, dv, dbeta


@triton.jit(do_not_specialize=["work", "first_chunk"])
def adjoint_kernel(
    q, k, v, beta, dy, log_alpha, inv_a, rescale, starts, counts, table, states, initial, prior,
    dq_parts, dk_parts, dv_parts, dbeta_parts, dlog_alpha_parts, dprior_parts, adjoints, scratch,
    counter, scale, work, first_chunk, size, slots, H, heads_per_group,
    stride_q, stride_k, stride_v, stride_beta, stride_dy,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, GROUP: tl.constexpr,
    HAS_INITIAL: tl.constexpr, PRIOR_GRADIENT: tl.constexpr, STAGES: tl.constexpr, DENSE_STAGES: tl.constexpr,
):  # fmt: skip
    PARTS_K: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    PARTS_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    PARTS: tl.constexpr = PARTS_K * PARTS_V
    TILE: tl.constexpr = BLOCK_K * BLOCK_V
    own_tile = tl.arange(0, BLOCK_K)[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    own = scratch + tl.program_id(0).to(tl.int64) * slots * 2 * TILE + own_tile
    state_size = H * K * V
    item = tl.atomic_add(counter, 1)
    while item < work:
        part = item % PARTS
        head = (item // PARTS) % H
        chunk = (first_chunk + item // (PARTS * H)).to(tl.int64)
        group = head // heads_per_group
        offs_k = (part // PARTS_V) * BLOCK_K + tl.arange(0, BLOCK_K)
        offs_v = (part % PARTS_V) * BLOCK_V + tl.arange(0, BLOCK_V)
        inside_k = offs_k < K
        inside_v = offs_v < V
        inside = inside_k[:, None] & inside_v[None, :]
        start, end = chunk_bounds(table, chunk)
        document, first = chunk_document(table, chunk)
        length = (end - start).to(tl.int32)
        if length > 0:
            tile = head * K * V + offs_k[:, None] * V + offs_v[None, :]
            boundary = states + chunk * 2 * state_size + tile
            given = initial + document * 2 * state_size + tile
            prior_h = tl.load(prior + head)

            key_at = k + start * stride_k + group * K
            query_at = q + start * stride_q + group * K
            value_at = v + start * stride_v + head * V
            beta_at = beta + start * stride_beta + head * V
            dy_at = dy + start * stride_dy + head * V
            scalar_at = start * H + head
            row_at = ((chunk - first_chunk) * size * H + head) * PARTS_V * K + (part % PARTS_V) * K + offs_k
            column_at = scalar_at * PARTS_K * V + (part // PARTS_V) * V + offs_v
            dlog_alpha_at = dlog_alpha_parts + scalar_at * PARTS + part

            spans = tl.load(counts + chunk * H + head)
            span_starts = starts + chunk * slots * H + head
            if spans != 1:
                # The states before each span or group into the scratch.
                mean, importance = load_boundary(boundary, given, state_size, inside, first, HAS_INITIAL)
                place = -1
                last = (length - 1) // GROUP * GROUP
                if spans > 0:
                    last = tl.load(span_starts + (spans - 1) * H)
                for i in tl.range(0, last + 1, num_stages=STAGES):
                    factor = tl.load(rescale + scalar_at + i * H)
                    alpha = tl.exp(tl.load(log_alpha + scalar_at + i * H))
                    key = load_row(key_at, i, stride_k, offs_k, inside_k)
                    value = load_row(value_at, i, stride_v, offs_v, inside_v)
                    precision = load_row(beta_at, i, stride_beta, offs_v, inside_v)
                    keep = (i == 0) | ((spans > 0) & (factor <= 1.0)) | ((spans == 0) & (i % GROUP == 0))
                    place += keep.to(tl.int32)
                    if keep:
                        tl.store(own + place * 2 * TILE, mean)
                        tl.store(own + place * 2 * TILE + TILE, importance)
                    mean = mean * alpha + key[:, None] * value[None, :]
                    importance = importance * alpha + (key * key)[:, None] * precision[None, :]
                tl.debug_barrier()

            d_mean = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
            d_importance = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
            d_prior = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
            if spans == 0:
                for step in tl.range(0, length, num_stages=DENSE_STAGES):
                    i = length - 1 - step
                    slot = own + (i // GROUP) * 2 * TILE
                    mean = tl.load(slot)
                    importance = tl.load(slot + TILE)
                    for ahead in tl.static_range(GROUP - 1):
                        j = (i // GROUP) * GROUP + ahead
                        alpha = tl.exp(tl.load(log_alpha + scalar_at + j * H, mask=j < i, other=0.0))
                        key = load_row(key_at, j, stride_k, offs_k, inside_k & (j < i))
                        value = load_row(value_at, j, stride_v, offs_v, inside_v & (j < i))
                        precision = load_row(beta_at, j, stride_beta, offs_v, inside_v & (j < i))
                        mean = mean * alpha + key[:, None] * value[None, :]
                        importance = importance * alpha + (key * key)[:, None] * precision[None, :]
                    alpha = tl.exp(tl.load(log_alpha + scalar_at + i * H))
                    key = load_row(key_at, i, stride_k, offs_k, inside_k)
                    query = load_row(query_at, i, stride_q, offs_k, inside_k)
                    value = load_row(value_at, i, stride_v, offs_v, inside_v)
                    precision = load_row(beta_at, i, stride_beta, offs_v, inside_v)
                    d_out = load_row(dy_at, i, stride_dy, offs_v, inside_v) * scale
                    mean *= alpha
                    importance *= alpha
                    d_mean, d_importance, dq, share = accumulate(
                        mean + key[:, None] * value[None, :],
                        importance + (key * key)[:, None] * precision[None, :] + prior_h,
                        query,
                        d_out,
                        d_mean,
                        d_importance,
                    )
                    if PRIOR_GRADIENT:
                        d_prior += query[:, None] * share
                    dk, dv, dbeta = input_gradients(d_mean, d_importance, key, value, precision, BLOCK_K, BLOCK_V)
                    d_log = tl.sum(d_mean * mean + d_importance * importance)
                    row = row_at + i * H * PARTS_V * K
                    tl.store(dq_parts + row, dq.to(dq_parts.dtype.element_ty), mask=inside_k)
                    tl.store(dk_parts + row, dk.to(dk_parts.dtype.element_ty), mask=inside_k)
                    column = column_at + i * H * PARTS_K * V
                    tl.store(dv_parts + column, dv.to(dv_parts.dtype.element_ty), mask=inside_v)
                    tl.store(dbeta_parts + column, dbeta.to(dbeta_parts.dtype.element_ty), mask=inside_v)
                    tl.store(dlog_alpha_at + i * H * PARTS, d_log)
                    d_mean *= alpha
                    d_importance *= alpha
            else:
                mean = tl.load(boundary, mask=inside, other=0.0)
                importance = tl.load(boundary + state_size, mask=inside, other=0.0)
                span_end = length
                for n in range(0, spans):
                    place = spans - 1 - n
                    span_start = tl.load(span_starts + place * H)
                    inverse = tl.load(inv_a + scalar_at + (span_end - 1) * H)
                    mean *= inverse
                    importance *= inverse
                    for step in tl.range(0, span_end - span_start, num_stages=STAGES):
                        i = span_end - 1 - step
                        inverse = tl.load(inv_a + scalar_at + i * H)
                        key = load_row(key_at, i, stride_k, offs_k, inside_k)
                        query = load_row(query_at, i, stride_q, offs_k, inside_k)
                        value = load_row(value_at, i, stride_v, offs_v, inside_v) * inverse
                        precision = load_row(beta_at, i, stride_beta, offs_v, inside_v) * inverse
                        d_out = load_row(dy_at, i, stride_dy, offs_v, inside_v) * scale
                        d_mean, d_importance, dq, share = accumulate(
                            mean, importance + prior_h * inverse, query, d_out, d_mean, d_importance
                        )
                        if PRIOR_GRADIENT:
                            d_prior += (query * inverse)[:, None] * share
                        dk, dv, dbeta = input_gradients(d_mean, d_importance, key, value, precision, BLOCK_K, BLOCK_V)
                        mean -= key[:, None] * value[None, :]
                        importance -= (key * key)[:, None] * precision[None, :]
                        d_log = tl.sum(d_mean * mean + d_importance * importance)
                        row = row_at + i * H * PARTS_V * K
                        tl.store(dq_parts + row, dq.to(dq_parts.dtype.element_ty), mask=inside_k)
                        tl.store(dk_parts + row, dk.to(dk_parts.dtype.element_ty), mask=inside_k)
                        column = column_at + i * H * PARTS_K * V
                        tl.store(dv_parts + column, (dv * inverse).to(dv_parts.dtype.element_ty), mask=inside_v)
                        tl.store(
                            dbeta_parts + column, (dbeta * inverse).to(dbeta_parts.dtype.element_ty), mask=inside_v
                        )
                        tl.store(dlog_alpha_at + i * H * PARTS, d_log)
                    # Across the span's start, into the frame of the span before; the state before it is exact again.
                    if spans == 1:
                        mean, importance = load_boundary(boundary, given, state_size, inside, first, HAS_INITIAL)
                    else:
                        mean = tl.load(own + place * 2 * TILE)
                        importance = tl.load(own + place * 2 * TILE + TILE)
                    alpha = tl.exp(tl.load(log_alpha + scalar_at + span_start * H))
                    d_log = tl.sum(d_mean * mean + d_importance * importance) * alpha
                    tl.store(dlog_alpha_at + span_start * H * PARTS, d_log)
                    factor = tl.load(rescale + scalar_at + span_start * H)
                    d_mean *= factor
                    d_importance *= factor
                    span_end = span_start
            tl.store(adjoints + chunk * 2 * state_size + tile, d_mean, mask=inside)
            tl.store(adjoints + (chunk * 2 + 1) * state_size + tile, d_importance, mask=inside)
            if PRIOR_GRADIENT:
                tl.store(dprior_parts + (chunk * H + head) * PARTS + part, -tl.sum(d_prior))
        item = tl.atomic_add(counter, 1)


@triton.jit(do_not_specialize=["first_chunk"])
def sum_parts_kernel(
    dq_parts, dk_parts, table, dq, dk, first_chunk, size, G,
    K: tl.constexpr, PARTS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0) // size
    i = tl.program_id(0) % size
    group = tl.program_id(1)
    start, end = chunk_bounds(table, first_chunk + chunk)
    if start + i < end:
        offs_k = tl.arange(0, BLOCK_K)
        parts = tl.arange(0, BLOCK_P)
        rows = ((chunk.to(tl.int64) * size + i) * G + group) * PARTS * K
        dq_sum = tl.zeros([BLOCK_P, BLOCK_K], tl.float32)
        dk_sum = tl.zeros([BLOCK_P, BLOCK_K], tl.float32)
        for base in range(0, PARTS, BLOCK_P):
            at = rows + (base + parts)[:, None] * K + offs_k[None, :]
            inside = (base + parts < PARTS)[:, None] & (offs_k < K)[None, :]
            dq_sum += tl.load(dq_parts + at, mask=inside, other=0.0).to(tl.float32)
            dk_sum += tl.load(dk_parts + at, mask=inside, other=0.0).to(tl.float32)
        at = ((start + i) * G + group) * K + offs_k
        tl.store(dq + at, tl.sum(dq_sum, axis=0).to(dq.dtype.element_ty), mask=offs_k < K)
        tl.store(dk + at, tl.sum(dk_sum, axis=0), mask=offs_k < K)


def tile_of(key_dim: int, value_dim: int) -> tuple[int, int]:
    """BLOCK_K and BLOCK_V: ELEMENTS in all, few parts of gradients, and no padding of K where that is possible."""
    block_k = 64 if key_dim % 64 == 0 else 16 if key_dim % 16 == 0 else min(64, triton.next_power_of_2(key_dim))
    return block_k, max(1, min(ELEMENTS // block_k, triton.next_power_of_2(value_dim)))


def processors(device: torch.device) -> int:
    """Multiprocessors of the device; 1 under the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@dataclass(frozen=True)
class ElementwiseGradients:
    """With zero adjoint behind each chunk; `dk` [B, T, G, K] fp32; v's and beta's [B, T, H, parts of K, V];
    log_alpha's [B, T, H, parts]; prior's [places, H, parts] or None; adjoints of the states before the chunks."""

    dq: Tensor
    dk: Tensor
    dv_parts: Tensor
    dbeta_parts: Tensor
    dlog_alpha_parts: Tensor
    dprior_parts: Tensor | None
    adjoints: Tensor


def elementwise_gradients(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, dy: Tensor, log_alpha: Tensor,
    spans: Spans, prior: Tensor, scale: float, states: Tensor, initial: Tensor | None,
    chunks: Chunks, dk: Tensor, *, prior_gradient: bool,
) -> ElementwiseGradients:  # fmt: skip
    """Run `adjoint_kernel` over all chunks, as many at a time as keeps the parts of dq and dk within PARTS_BYTES.

    The sum over a group's heads and the blocks of V goes to dq in v's dtype and to dk [B, T, G, K] in fp32.
    """
    batch, tokens, groups, key_dim = k.shape
    heads, value_dim = v.shape[2:]
    block_k, block_v = tile_of(key_dim, value_dim)
    parts_k, parts_v = triton.cdiv(key_dim, block_k), triton.cdiv(value_dim, block_v)
    parts = parts_k * parts_v
    part_dtype = torch.float32 if v.dtype == torch.float32 else torch.bfloat16

    row_bytes = 2 * chunks.size * heads * parts_v * key_dim * part_dtype.itemsize
    at_once = max(1, min(chunks.places, PARTS_BYTES // row_bytes))
    qk_parts = torch.empty(2, at_once, chunks.size, heads, parts_v, key_dim, device=q.device, dtype=part_dtype)
    programs = min(at_once * heads * parts, PROGRAMS_PER_PROCESSOR * processors(q.device))
    scratch = states.new_empty(programs, spans.slots, 2, block_k * block_v)

    dq = torch.zeros(q.shape, device=q.device, dtype=v.dtype)
    dv_parts = torch.zeros(
        batch, tokens, heads, parts_k, value_dim, device=q.device, dtype=v.dtype if parts_k == 1 else part_dtype
    )
    dbeta_parts = torch.zeros_like(dv_parts)
    dlog_alpha_parts = log_alpha.new_empty(*log_alpha.shape, parts)
    dprior_parts = log_alpha.new_zeros(chunks.places, heads, parts) if prior_gradient else None
    adjoints = torch.empty_like(states)
    counters = torch.zeros(triton.cdiv(chunks.places, at_once), device=q.device, dtype=torch.int32)
    for n, first_chunk in enumerate(range(0, chunks.places, at_once)):
        count = min(at_once, chunks.places - first_chunk)
        work = count * heads * parts
        adjoint_kernel[(min(work, programs),)](
            q, k, v, beta, dy, log_alpha, spans.inv_a, spans.rescale, spans.starts,
            spans.counts, chunks.table, states,
            states if initial is None else initial, prior, qk_parts[0], qk_parts[1], dv_parts, dbeta_parts,
            dlog_alpha_parts, dlog_alpha_parts if dprior_parts is None else dprior_parts, adjoints, scratch,
            counters[n:], scale, work, first_chunk, chunks.size, spans.slots, heads, heads // groups,
            q.stride(1), k.stride(1), v.stride(1), beta.stride(1), dy.stride(1),
            K=key_dim, V=value_dim, BLOCK_K=block_k, BLOCK_V=block_v, GROUP=GROUP,
            HAS_INITIAL=initial is not None, PRIOR_GRADIENT=prior_gradient, STAGES=STAGES, DENSE_STAGES=DENSE_STAGES,
            num_warps=1,
        )  # fmt: skip
        rows = heads // groups * parts_v
        sum_parts_kernel[(count * chunks.size, groups)](
            qk_parts[0], qk_parts[1], chunks.table, dq, dk, first_chunk, chunks.size, groups,
            K=key_dim, PARTS=rows, BLOCK_K=triton.next_power_of_2(key_dim),
            BLOCK_P=min(32, triton.next_power_of_2(rows)), num_warps=4 if rows > 16 else 1,
        )  # fmt: skip
    return ElementwiseGradients(dq, dk, dv_parts, dbeta_parts, dlog_alpha_parts, dprior_parts, adjoints)
