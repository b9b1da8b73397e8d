"""Palimpsa's readout: each program walks one chunk of one head with a block of value channels in registers."""

import triton
import triton.language as tl
from torch import Tensor

from palimpsa_kernels.triton.chunks import Chunks
from palimpsa_kernels.triton.decay import Spans
from palimpsa_kernels.triton.launches import cdiv, next_power_of_2
from palimpsa_kernels.triton.primitives import chunk_bounds, chunk_document, fast_reciprocal, thread_sums
from palimpsa_kernels.triton.tiles import in_pairs, load_boundary, load_columns, load_query_key, tile_order

STAGES = 3
ELEMENTS = 2048  # of one state in the registers of a program's one warp


@triton.jit
def read(mean, importance, query, prior_h, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """(M / (prior + Ibar))^T q over a tile, summed within threads alone."""
    return thread_sums(mean * fast_reciprocal(importance + prior_h) * query[:, None], BLOCK_K, BLOCK_V)


@triton.jit
def add_token(mean, importance, key, value, precision):
    return mean + key[:, None] * value[None, :], importance + (key * key)[:, None] * precision[None, :]


@triton.jit
def readout_kernel(
    qk, v, beta, log_alpha, inv_a, rescale, starts, counts, table, states, initial, prior, y,
    slots, H, heads_per_group, stride_qk, stride_v, stride_beta,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, TAIL_K: tl.constexpr, BLOCK_V: tl.constexpr,
    HAS_INITIAL: tl.constexpr, EVEN: tl.constexpr, PAIRS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # K is covered by one tile, or by two where that spares padding.
    HAS_TAIL: tl.constexpr = TAIL_K > 0
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(2)
    first_v = tl.program_id(1) * BLOCK_V
    offs_v = first_v + tl.arange(0, BLOCK_V)
    inside_v = offs_v < V
    start, end = chunk_bounds(table, chunk)
    document, first = chunk_document(table, chunk)
    size = H * K * V
    natural_k = tl.arange(0, BLOCK_K)
    offs_k = tile_order(natural_k, BLOCK_K, BLOCK_V)
    tile = head * K * V + offs_k[:, None] * V + offs_v[None, :]
    inside = (offs_k < K)[:, None] & inside_v[None, :]
    boundary = states + chunk * 2 * size + tile
    given = initial + document * 2 * size + tile
    mean, importance = load_boundary(boundary, given, size, inside, first, HAS_INITIAL)
    pair_at = qk + start * stride_qk + (head // heads_per_group) * 2 * K
    pairs = natural_k[:, None] * 2 + tl.arange(0, 2)[None, :]
    if HAS_TAIL:
        natural_tail = tl.arange(0, TAIL_K)
        offs_tail = BLOCK_K + tile_order(natural_tail, TAIL_K, BLOCK_V)
        tail = (offs_tail - BLOCK_K)[:, None] * V + offs_v[None, :] + head * K * V + BLOCK_K * V
        inside_tail = (offs_tail < K)[:, None] & inside_v[None, :]
        boundary = states + chunk * 2 * size + tail
        given = initial + document * 2 * size + tail
        tail_mean, tail_importance = load_boundary(boundary, given, size, inside_tail, first, HAS_INITIAL)
        tail_pairs = (BLOCK_K + natural_tail)[:, None] * 2 + tl.arange(0, 2)[None, :]
    prior_h = tl.load(prior + head)
    v += start * stride_v + head * V + first_v
    beta += start * stride_beta + head * V + first_v
    y += start * H * V + head * V + offs_v
    scalar_at = start * H + head
    length = (end - start).to(tl.int32)
    spans = tl.load(counts + chunk * H + head)
    span_starts = starts + chunk * slots * H + head
    # A dense chunk is one run of decayed states; a span's are divided by the decay since its start.
    for n in range(0, tl.maximum(spans, 1)):
        span_start = 0
        span_end = length
        if spans > 0:
            span_start = tl.load(span_starts + n * H)
            if n + 1 < spans:
                span_end = tl.load(span_starts + (n + 1) * H)
            factor = tl.load(rescale + scalar_at + span_start * H)
            mean *= factor
            importance *= factor
            if HAS_TAIL:
                tail_mean *= factor
                tail_importance *= factor
            for i in tl.range(span_start, span_end, num_stages=STAGES):
                inverse = tl.load(inv_a + scalar_at + i * H)
                value = load_columns(v + i * stride_v, inside_v, BLOCK_V, EVEN, PAIRS) * inverse
                precision = load_columns(beta + i * stride_beta, inside_v, BLOCK_V, EVEN, PAIRS) * inverse
                query, key = load_query_key(pair_at + i * stride_qk + pairs, pairs < 2 * K, BLOCK_K, BLOCK_V, EVEN)
                mean, importance = add_token(mean, importance, key, value, precision)
                out = read(mean, importance, query, prior_h * inverse, BLOCK_K, BLOCK_V)
                if HAS_TAIL:
                    query, key = load_query_key(
                        pair_at + i * stride_qk + tail_pairs, tail_pairs < 2 * K, TAIL_K, BLOCK_V, EVEN
                    )
                    tail_mean, tail_importance = add_token(tail_mean, tail_importance, key, value, precision)
                    out += read(tail_mean, tail_importance, query, prior_h * inverse, TAIL_K, BLOCK_V)
                tl.store(y + i * H * V, tl.sum(out, axis=0).to(y.dtype.element_ty), mask=inside_v)
        else:
            for i in tl.range(0, length, num_stages=STAGES):
                alpha = tl.exp(tl.load(log_alpha + scalar_at + i * H))
                value = load_columns(v + i * stride_v, inside_v, BLOCK_V, EVEN, PAIRS)
                precision = load_columns(beta + i * stride_beta, inside_v, BLOCK_V, EVEN, PAIRS)
                query, key = load_query_key(pair_at + i * stride_qk + pairs, pairs < 2 * K, BLOCK_K, BLOCK_V, EVEN)
                mean, importance = add_token(mean * alpha, importance * alpha, key, value, precision)
                out = read(mean, importance, query, prior_h, BLOCK_K, BLOCK_V)
                if HAS_TAIL:
                    query, key = load_query_key(
                        pair_at + i * stride_qk + tail_pairs, tail_pairs < 2 * K, TAIL_K, BLOCK_V, EVEN
                    )
                    tail_mean, tail_importance = add_token(
                        tail_mean * alpha, tail_importance * alpha, key, value, precision
                    )
                    out += read(tail_mean, tail_importance, query, prior_h, TAIL_K, BLOCK_V)
                tl.store(y + i * H * V, tl.sum(out, axis=0).to(y.dtype.element_ty), mask=inside_v)


def key_tiles(key_dim: int) -> tuple[int, int]:
    """Powers of two that cover K: one, or two whose sum is K."""
    whole = next_power_of_2(key_dim)
    rest = key_dim - whole // 2
    return (whole // 2, rest) if rest >= 16 and rest == next_power_of_2(rest) else (whole, 0)


def readout(
    qk: Tensor, v: Tensor, beta: Tensor, log_alpha: Tensor, spans: Spans, prior: Tensor, states: Tensor,
    initial: Tensor | None, chunks: Chunks, y: Tensor,
) -> None:  # fmt: skip
    """Write y_t = scale * (M_t / (prior + Ibar_t)) @ q_t for the tokens of all chunks; `qk` of `pack_query_key`."""
    groups, key_dim = qk.shape[2:4]
    heads, value_dim = v.shape[2:]
    block_k, tail_k = key_tiles(key_dim)
    block_v = min(ELEMENTS // next_power_of_2(key_dim), next_power_of_2(value_dim))
    even = block_k + tail_k == key_dim and value_dim % block_v == 0
    grid = (chunks.places, cdiv(value_dim, block_v), heads)
    readout_kernel[grid](
        qk, v, beta, log_alpha, spans.inv_a, spans.rescale, spans.starts, spans.counts, chunks.table, states,
        states if initial is None else initial, prior, y, spans.slots, heads, heads // groups,
        qk.stride(1), v.stride(1), beta.stride(1),
        K=key_dim, V=value_dim, BLOCK_K=block_k, TAIL_K=tail_k, BLOCK_V=block_v, HAS_INITIAL=initial is not None,
        EVEN=even, PAIRS=even and block_v > 1 and in_pairs(v, beta), STAGES=STAGES, num_warps=1,
    )  # fmt: skip
