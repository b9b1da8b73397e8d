"""The elementwise part of Palimpsa's backward pass, parallel over chunks.

A program takes one piece of work after the other: it walks one chunk of one head backwards over a [BLOCK_K, BLOCK_V]
tile of the state. With zero adjoint behind the chunk it accumulates the adjoints of the two states,

    w_t = dy_t q_t / I_t,   dM += w_t,   dIbar -= w_t M_t / I_t,

and reads every gradient off them. The state before each span or pair of tokens (see `decay`) is the one at the chunk's
boundary or lies in the program's own scratch, filled by one walk forward.

With bf16 inputs tensor cores form the sums over V, of terms cut to tf32, and the gradient to log_alpha, in its direct
form at each span's start, comes inside of a span from what a token adds,

    <dM_t, M_t-1> + <dI_t, I_t-1> = <dM_t+1, M_t> + <dI_t+1, I_t> + prior sum(q share) - v . dv - beta . dbeta,

whose cancelling stays small where the decay does. Other inputs take fp32 sums and the direct form at every token.
"""

import functools
import logging
import re
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from palimpsa_kernels.triton.chunks import Chunks
from palimpsa_kernels.triton.decay import Spans
from palimpsa_kernels.triton.primitives import (
    anew,
    chunk_bounds,
    chunk_document,
    column_sums,
    fast_reciprocal,
    row_copies,
    row_lanes,
    row_sums,
    thread_sums,
)
from palimpsa_kernels.triton.targets import adjoint_tiles, capability
from palimpsa_kernels.triton.tiles import (
    in_pairs,
    load_boundary,
    load_columns,
    load_query_key,
    pack_query_key,
    tile_offsets,
)

logger = logging.getLogger("palimpsa_kernels")

ELEMENTS = 1024  # of one state in the registers of a program's one warp
PROGRAMS_PER_PROCESSOR = 8
STAGES = 4
DENSE_STAGES = 1

PARTS_BYTES = 1 << 30  # of the parts of dq and dk that exist at a time


@triton.jit
def step_back(
    mean, importance, prior_h, query, key, value, precision, d_out, d_mean, d_importance,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add a token's share to the adjoints, behind which all states and `prior_h` are, and read its gradients off them.

    Returns the adjoints, the gradients to q and k as copies, to v and beta as sums within threads, Ibar's share / q.
    """
    reciprocal = fast_reciprocal(importance + prior_h)
    weight = reciprocal * d_out[None, :]
    share = mean * weight
    dq = row_sums(share, tl.full([BLOCK_V], 1.0, tl.float32), BLOCK_K, BLOCK_V, EXACT)
    share *= reciprocal
    d_mean += query[:, None] * weight
    d_importance -= query[:, None] * share
    dk = row_sums(d_mean, value, BLOCK_K, BLOCK_V, EXACT)
    dk += key[:, None] * row_sums(d_importance, 2 * precision, BLOCK_K, BLOCK_V, EXACT)
    dv = thread_sums(d_mean * key[:, None], BLOCK_K, BLOCK_V)
    dbeta = thread_sums(d_importance * (key * key)[:, None], BLOCK_K, BLOCK_V)
    return d_mean, d_importance, dq, dk, dv, dbeta, share


@triton.jit
def store_rows(pointer, dq, dk, mask, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """Parts of dq and dk from two of their copies [BLOCK_K, copies], neighbouring rows of a thread side by side."""
    LANES: tl.constexpr = row_lanes(BLOCK_K, BLOCK_V)
    COPIES: tl.constexpr = row_copies(BLOCK_V)
    first = (tl.arange(0, COPIES) == 0)[None, :]
    rows = tl.reshape(tl.where(first, dq, dk), [BLOCK_K // LANES, LANES, COPIES])
    tl.store(pointer, tl.permute(rows, (2, 1, 0)).to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def store_columns(
    dv_pointer, dbeta_pointer, at, dv, dbeta, factor, columns, BLOCK_V: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """Parts of dv and dbeta from the partial sums of `thread_sums`; below `columns` of BLOCK_V."""
    if EXACT:
        offs = tl.arange(0, BLOCK_V)
        inside = offs < columns
        tl.store(dv_pointer + at + offs, (tl.sum(dv, axis=0) * factor).to(dv_pointer.dtype.element_ty), mask=inside)
        dbeta = tl.sum(dbeta, axis=0) * factor
        tl.store(dbeta_pointer + at + offs, dbeta.to(dbeta_pointer.dtype.element_ty), mask=inside)
    else:
        KEPT: tl.constexpr = BLOCK_V // 16
        ROWS: tl.constexpr = 4 // KEPT
        row = tl.arange(0, 2 * ROWS)[:, None, None]
        offs = tl.arange(0, BLOCK_V // 4)[None, :, None] * 4 + row % ROWS * KEPT + tl.arange(0, KEPT)[None, None, :]
        sums = (column_sums(dv, dbeta, BLOCK_V) * factor).to(dv_pointer.dtype.element_ty)
        tl.store(tl.where(row < ROWS, dv_pointer, dbeta_pointer) + offs + at, sums)


@triton.jit
def product_sum(d_mean, mean, d_importance, importance, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """<dM, M> + <dIbar, Ibar> over the tile."""
    return tl.sum(
        thread_sums(d_mean * mean, BLOCK_K, BLOCK_V) + thread_sums(d_importance * importance, BLOCK_K, BLOCK_V)
    )


@triton.jit(do_not_specialize=["work", "first_chunk"])
def adjoint_kernel(
    qk, v, beta, dy, log_alpha, inv_a, rescale, starts, counts, table, states, initial, prior,
    row_parts, dv_parts, dbeta_parts, dlog_alpha_parts, dprior_parts, adjoints, scratch,
    counter, work, first_chunk, size, slots, span_slots, H, heads_per_group,
    stride_qk, stride_v, stride_beta, stride_dy,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    HAS_INITIAL: tl.constexpr, PRIOR_GRADIENT: tl.constexpr, EXACT: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, DENSE_STAGES: tl.constexpr,
):  # fmt: skip
    PARTS_K: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    PARTS_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    PARTS: tl.constexpr = PARTS_K * PARTS_V
    PAIRS: tl.constexpr = not EXACT
    TILE: tl.constexpr = BLOCK_K * BLOCK_V
    own_tile = tl.arange(0, BLOCK_K)[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    own = scratch + tl.program_id(0).to(tl.int64) * slots * 2 * TILE + own_tile
    LANES: tl.constexpr = row_lanes(BLOCK_K, BLOCK_V)
    COPIES: tl.constexpr = row_copies(BLOCK_V)
    ROWS: tl.constexpr = BLOCK_K // LANES
    KEYS: tl.constexpr = (K + ROWS - 1) // ROWS * ROWS
    copy = tl.arange(0, COPIES)[:, None, None]
    within = tl.arange(0, LANES)[None, :, None] * 2 * ROWS + copy * ROWS + tl.arange(0, ROWS)[None, None, :]
    state_size = H * K * V
    item = tl.atomic_add(counter, 1)
    while item < work:
        part = item % PARTS
        head = (item // PARTS) % H
        chunk = (first_chunk + item // (PARTS * H)).to(tl.int64)
        group = head // heads_per_group
        natural_k = (part // PARTS_V) * BLOCK_K + tl.arange(0, BLOCK_K)
        first_v = (part % PARTS_V) * BLOCK_V
        inside_v = first_v + tl.arange(0, BLOCK_V) < V
        start, end = chunk_bounds(table, chunk)
        document, first = chunk_document(table, chunk)
        length = (end - start).to(tl.int32)
        if length > 0:
            boundary = states + chunk * 2 * state_size
            given = initial + document * 2 * state_size
            tile, inside = tile_offsets(part, head, K, V, BLOCK_K, BLOCK_V)
            prior_h = tl.load(prior + head)

            pair_at = qk + start * stride_qk + group * 2 * K + natural_k[:, None] * 2 + tl.arange(0, 2)[None, :]
            pair_mask = natural_k[:, None] + 0 * tl.arange(0, 2)[None, :] < K
            value_at = v + start * stride_v + head * V + first_v
            beta_at = beta + start * stride_beta + head * V + first_v
            dy_at = dy + start * stride_dy + head * V + first_v
            scalar_at = start * H + head
            row_at = row_parts + (((chunk - first_chunk) * size * H + head) * PARTS_V + part % PARTS_V) * 2 * KEYS
            row_at += (part // PARTS_V) * 2 * BLOCK_K
            left = K - (part // PARTS_V) * BLOCK_K
            row_mask = (within // (2 * ROWS) * ROWS + within % ROWS < left) & (copy < 2)
            columns_at = scalar_at * PARTS_K * V + (part // PARTS_V) * V + first_v
            dv_at = dv_parts + columns_at
            dbeta_at = dbeta_parts + columns_at
            dlog_alpha_at = dlog_alpha_parts + scalar_at * PARTS + part

            spans = tl.load(counts + chunk * H + head)
            span_starts = starts + chunk * span_slots * H + head
            # To the scratch: states before each span, in the frame of the one before, or decayed before each pair.
            if spans > 1:
                mean, importance = load_boundary(boundary + tile, given + tile, state_size, inside, first, HAS_INITIAL)
                span_start = 0
                for place in range(1, spans):
                    factor = tl.load(rescale + scalar_at + span_start * H)
                    mean *= factor
                    importance *= factor
                    span_end = tl.load(span_starts + place * H)
                    for i in tl.range(span_start, span_end, num_stages=STAGES):
                        inverse = tl.load(inv_a + scalar_at + i * H)
                        _, key = load_query_key(pair_at + i * stride_qk, pair_mask, BLOCK_K, BLOCK_V, EVEN)
                        value = load_columns(value_at + i * stride_v, inside_v, BLOCK_V, EVEN, PAIRS) * inverse
                        precision = load_columns(beta_at + i * stride_beta, inside_v, BLOCK_V, EVEN, PAIRS) * inverse
                        mean += key[:, None] * value[None, :]
                        importance += (key * key)[:, None] * precision[None, :]
                    tl.store(own + place * 2 * TILE, mean)
                    tl.store(own + place * 2 * TILE + TILE, importance)
                    span_start = span_end
                tl.debug_barrier()
            if spans == 0:
                mean, importance = load_boundary(boundary + tile, given + tile, state_size, inside, first, HAS_INITIAL)
                for place in tl.range(0, (length + 1) // 2, num_stages=STAGES):
                    for second in tl.static_range(2):
                        # Behind a last odd token the states are not used.
                        i = tl.minimum(2 * place + second, length - 1)
                        alpha = tl.exp(tl.load(log_alpha + scalar_at + i * H))
                        _, key = load_query_key(pair_at + i * stride_qk, pair_mask, BLOCK_K, BLOCK_V, EVEN)
                        value = load_columns(value_at + i * stride_v, inside_v, BLOCK_V, EVEN, PAIRS)
                        precision = load_columns(beta_at + i * stride_beta, inside_v, BLOCK_V, EVEN, PAIRS)
                        mean *= alpha
                        importance *= alpha
                        if second == 0:
                            tl.store(own + place * 2 * TILE, mean)
                            tl.store(own + place * 2 * TILE + TILE, importance)
                        mean += key[:, None] * value[None, :]
                        importance += (key * key)[:, None] * precision[None, :]
                tl.debug_barrier()

            d_mean = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
            d_importance = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
            d_prior = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
            if spans == 0:
                for step in tl.range(0, length, num_stages=DENSE_STAGES):
                    i = length - 1 - step
                    slot = own + i // 2 * 2 * TILE
                    mean = tl.load(slot)
                    importance = tl.load(slot + TILE)
                    before = tl.maximum(i - 1, 0)
                    _, key_before = load_query_key(pair_at + before * stride_qk, pair_mask, BLOCK_K, BLOCK_V, EVEN)
                    value_before = load_columns(value_at + before * stride_v, inside_v, BLOCK_V, EVEN, PAIRS)
                    precision_before = load_columns(beta_at + before * stride_beta, inside_v, BLOCK_V, EVEN, PAIRS)
                    alpha = tl.exp(tl.load(log_alpha + scalar_at + i * H))
                    query, key = load_query_key(pair_at + i * stride_qk, pair_mask, BLOCK_K, BLOCK_V, EVEN)
                    value = load_columns(value_at + i * stride_v, inside_v, BLOCK_V, EVEN, PAIRS)
                    precision = load_columns(beta_at + i * stride_beta, inside_v, BLOCK_V, EVEN, PAIRS)
                    d_out = load_columns(dy_at + i * stride_dy, inside_v, BLOCK_V, EVEN, PAIRS)
                    # The decayed state before a pair's first token; before the second one, a step later.
                    if i % 2 == 1:
                        mean = (mean + key_before[:, None] * value_before[None, :]) * alpha
                        importance += (key_before * key_before)[:, None] * precision_before[None, :]
                        importance *= alpha
                    d_mean, d_importance, dq, dk, dv, dbeta, share = step_back(
                        mean + key[:, None] * value[None, :],
                        importance + (key * key)[:, None] * precision[None, :],
                        prior_h, query, key, value, precision, d_out, d_mean, d_importance, BLOCK_K, BLOCK_V, EXACT,
                    )  # fmt: skip
                    if PRIOR_GRADIENT:
                        d_prior += query[:, None] * share
                    d_log = product_sum(d_mean, mean, d_importance, importance, BLOCK_K, BLOCK_V)
                    store_rows(row_at + i * H * PARTS_V * 2 * KEYS + within, dq, dk, row_mask, BLOCK_K, BLOCK_V)
                    store_columns(dv_at, dbeta_at, i * H * PARTS_K * V, dv, dbeta, 1.0, V - first_v, BLOCK_V, EXACT)
                    tl.store(dlog_alpha_at + i * H * PARTS, d_log)
                    d_mean *= alpha
                    d_importance *= alpha
            else:
                inverse = tl.load(inv_a + scalar_at + (length - 1) * H)
                mean = tl.load(boundary + tile, mask=inside, other=0.0) * inverse
                importance = tl.load(boundary + tile + state_size, mask=inside, other=0.0) * inverse
                # <dM, M> + <dIbar, Ibar> between two tokens, the same in every frame; 0 behind the chunk.
                d_log = 0.0
                span_end = length
                for n in range(0, spans):
                    place = spans - 1 - n
                    span_start = tl.load(span_starts + place * H)
                    for step in tl.range(0, span_end - span_start, num_stages=STAGES):
                        i = span_end - 1 - step
                        inverse = tl.load(inv_a + scalar_at + i * H)
                        query, key = load_query_key(pair_at + i * stride_qk, pair_mask, BLOCK_K, BLOCK_V, EVEN)
                        value = load_columns(value_at + i * stride_v, inside_v, BLOCK_V, EVEN, PAIRS)
                        precision = load_columns(beta_at + i * stride_beta, inside_v, BLOCK_V, EVEN, PAIRS)
                        d_out = load_columns(dy_at + i * stride_dy, inside_v, BLOCK_V, EVEN, PAIRS)
                        d_mean, d_importance, dq, dk, dv, dbeta, share = step_back(
                            mean, importance, prior_h * inverse, query, key, value, precision, d_out,
                            d_mean, d_importance, BLOCK_K, BLOCK_V, EXACT,
                        )  # fmt: skip
                        if PRIOR_GRADIENT:
                            d_prior += (query * inverse)[:, None] * share
                        value *= inverse
                        precision *= inverse
                        mean -= key[:, None] * value[None, :]
                        importance -= (key * key)[:, None] * precision[None, :]
                        if EXACT:
                            d_log = product_sum(d_mean, mean, d_importance, importance, BLOCK_K, BLOCK_V)
                        else:
                            ratio = thread_sums(share * query[:, None], BLOCK_K, BLOCK_V)
                            d_log += tl.sum(
                                (prior_h * inverse) * ratio - dv * value[None, :] - dbeta * precision[None, :]
                            )
                        store_rows(
                            row_at + i * H * PARTS_V * 2 * KEYS + within, dq, dk * inverse, row_mask, BLOCK_K, BLOCK_V
                        )
                        store_columns(
                            dv_at, dbeta_at, i * H * PARTS_K * V, dv, dbeta, inverse, V - first_v, BLOCK_V, EXACT
                        )
                        tl.store(dlog_alpha_at + i * H * PARTS, d_log)
                    # Across the span's start into the frame of the span before, whose state is exact again.
                    if place == 0:
                        tile, inside = tile_offsets(anew(part), head, K, V, BLOCK_K, BLOCK_V)
                        mean, importance = load_boundary(
                            boundary + tile, given + tile, state_size, inside, first, HAS_INITIAL
                        )
                    else:
                        mean = tl.load(own + place * 2 * TILE)
                        importance = tl.load(own + place * 2 * TILE + TILE)
                    factor = tl.load(rescale + scalar_at + span_start * H)
                    d_mean *= factor
                    d_importance *= factor
                    d_log = product_sum(d_mean, mean, d_importance, importance, BLOCK_K, BLOCK_V)
                    tl.store(dlog_alpha_at + span_start * H * PARTS, d_log)
                    span_end = span_start
            tile, inside = tile_offsets(anew(part), head, K, V, BLOCK_K, BLOCK_V)
            tl.store(adjoints + chunk * 2 * state_size + tile, d_mean, mask=inside)
            tl.store(adjoints + (chunk * 2 + 1) * state_size + tile, d_importance, mask=inside)
            if PRIOR_GRADIENT:
                tl.store(dprior_parts + (chunk * H + head) * PARTS + part, -tl.sum(d_prior))
        item = tl.atomic_add(counter, 1)


@triton.jit(do_not_specialize=["first_chunk"])
def sum_parts_kernel(
    row_parts, table, dq, dk, scale, first_chunk, size, G,
    K: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    KEYS: tl.constexpr = (K + ROWS - 1) // ROWS * ROWS
    chunk = tl.program_id(0) // size
    i = tl.program_id(0) % size
    group = tl.program_id(1)
    start, end = chunk_bounds(table, first_chunk + chunk)
    if start + i < end:
        offs_k = tl.arange(0, BLOCK_K)
        parts = tl.arange(0, BLOCK_P)
        rows = ((chunk.to(tl.int64) * size + i) * G + group) * PARTS * 2 * KEYS
        dq_sum = tl.zeros([BLOCK_P, BLOCK_K], tl.float32)
        dk_sum = tl.zeros([BLOCK_P, BLOCK_K], tl.float32)
        for base in range(0, PARTS, BLOCK_P):
            at = row_parts + rows + (base + parts)[:, None] * 2 * KEYS + (offs_k // ROWS * ROWS + offs_k)[None, :]
            inside = (base + parts < PARTS)[:, None] & (offs_k < K)[None, :]
            dq_sum += tl.load(at, mask=inside, other=0.0).to(tl.float32)
            dk_sum += tl.load(at + ROWS, mask=inside, other=0.0).to(tl.float32)
        at = ((start + i) * G + group) * K + offs_k
        tl.store(dq + at, (tl.sum(dq_sum, axis=0) * scale).to(dq.dtype.element_ty), mask=offs_k < K)
        tl.store(dk + at, tl.sum(dk_sum, axis=0), mask=offs_k < K)


def tile_of(key_dim: int, value_dim: int, target: int) -> tuple[int, int]:
    """BLOCK_K and BLOCK_V: without padding where possible, at most ELEMENTS, and few parts of gradients."""
    for tile in adjoint_tiles(target):
        if key_dim % tile[0] == 0 and value_dim % tile[1] == 0:
            return tile
    block_k = 64 if key_dim % 64 == 0 else 16 if key_dim % 16 == 0 else min(64, triton.next_power_of_2(key_dim))
    return block_k, max(1, min(ELEMENTS // block_k, triton.next_power_of_2(value_dim)))


@functools.cache
def layout_fits(kernel: Any, block_v: int) -> bool:
    """Whether the compiler laid the tiles out as the assembly in `primitives` takes them to be."""
    code = kernel.asm["ttgir"]
    copies = block_v // 4
    expected = rf"sizePerThread = \[1, 4\], threadsPerWarp = \[{32 // copies}, {copies}\].*order = \[1, 0\]"
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.blocked<.*>)$", code, re.MULTILINE))
    used = re.findall(r'elementwise_inline_asm ".*mma\.sync.*-> tensor<\d+x\d+xf32, (#\w+)>', code)
    fits = bool(used) and all(re.search(expected, layouts.get(name, "")) for name in used)
    if not fits:
        logger.warning("This Triton lays tiles out differently: sums by fp32 lanes instead of tensor cores, slower.")
    return fits


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
    target = capability(q.device)
    block_k, block_v = tile_of(key_dim, value_dim, target)
    parts_k, parts_v = triton.cdiv(key_dim, block_k), triton.cdiv(value_dim, block_v)
    parts = parts_k * parts_v
    part_dtype = torch.float32 if v.dtype == torch.float32 else torch.bfloat16

    # The scale of dy goes along with q.
    qk = pack_query_key(q, k, scale)
    sharing = heads // groups * parts_v
    even = key_dim % block_k == 0 and value_dim % block_v == 0
    exact = not (even and (block_k, block_v) in adjoint_tiles(target) and in_pairs(v, beta, dy))
    rows = block_k // row_lanes(block_k, block_v)
    row_length = triton.cdiv(key_dim, rows) * rows
    row_bytes = 2 * chunks.size * heads * parts_v * row_length * part_dtype.itemsize
    at_once = max(1, min(chunks.places, PARTS_BYTES // row_bytes))
    row_parts = torch.empty(
        at_once, chunks.size, heads, parts_v, 2, row_length, device=q.device, dtype=part_dtype
    )  # fmt: skip
    programs = min(at_once * heads * parts, PROGRAMS_PER_PROCESSOR * processors(q.device))
    slots = max(triton.cdiv(chunks.size, 2), spans.slots)
    scratch = states.new_empty(programs, slots, 2, block_k * block_v)

    # Tokens behind the last offset take no gradient.
    allocate = torch.empty if chunks.cover_all else torch.zeros
    dq = allocate(q.shape, device=q.device, dtype=v.dtype)
    dv_parts, dbeta_parts = (
        allocate(
            batch, tokens, heads, parts_k, value_dim, device=q.device, dtype=v.dtype if parts_k == 1 else part_dtype
        )
        for _ in range(2)
    )
    dlog_alpha_parts = log_alpha.new_empty(*log_alpha.shape, parts)
    dprior_parts = log_alpha.new_zeros(chunks.places, heads, parts) if prior_gradient else None
    adjoints = torch.empty_like(states)

    def launch(first_chunk: int, count: int, exact: bool) -> Any:
        work = count * heads * parts
        return adjoint_kernel[(min(work, programs),)](
            qk, v, beta, dy, log_alpha, spans.inv_a, spans.rescale, spans.starts, spans.counts, chunks.table, states,
            states if initial is None else initial, prior, row_parts, dv_parts, dbeta_parts, dlog_alpha_parts,
            dlog_alpha_parts if dprior_parts is None else dprior_parts, adjoints, scratch,
            torch.zeros(1, device=q.device, dtype=torch.int32), work, first_chunk, chunks.size, slots, spans.slots,
            heads, heads // groups, qk.stride(1), v.stride(1), beta.stride(1), dy.stride(1),
            K=key_dim, V=value_dim, BLOCK_K=block_k, BLOCK_V=block_v, HAS_INITIAL=initial is not None,
            PRIOR_GRADIENT=prior_gradient, EXACT=exact, EVEN=even,
            STAGES=STAGES, DENSE_STAGES=DENSE_STAGES, num_warps=1,
        )  # fmt: skip

    for first_chunk in range(0, chunks.places, at_once):
        count = min(at_once, chunks.places - first_chunk)
        kernel = launch(first_chunk, count, exact)
        if not exact and kernel is not None and not layout_fits(kernel, block_v):
            exact = True
            launch(first_chunk, count, exact)
        sum_parts_kernel[(count * chunks.size, groups)](
            row_parts, chunks.table, dq, dk, scale, first_chunk, chunks.size, groups,
            K=key_dim, PARTS=sharing, ROWS=rows, BLOCK_K=triton.next_power_of_2(key_dim),
            BLOCK_P=min(32, triton.next_power_of_2(sharing)), num_warps=4 if sharing > 16 else 1,
        )  # fmt: skip
    return ElementwiseGradients(dq, dk, dv_parts, dbeta_parts, dlog_alpha_parts, dprior_parts, adjoints)
