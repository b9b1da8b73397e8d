"""Palimpsa's readout: each program walks one chunk of one head with a block of value channels in registers."""

import triton
import triton.language as tl
from torch import Tensor

from palimpsa_kernels.triton.chunks import Chunks
from palimpsa_kernels.triton.decay import Spans
from palimpsa_kernels.triton.primitives import chunk_bounds, chunk_document, fast_reciprocal

STAGES = 3
ELEMENTS = 2048  # of one state in the registers of a program's one warp


@triton.jit
def readout_kernel(
    q, k, v, beta, log_alpha, inv_a, rescale, starts, counts, table, states, initial, prior, y,
    scale, slots, H, heads_per_group,
    stride_q, stride_k, stride_v, stride_beta,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    HAS_INITIAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    head = tl.program_id(2)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside_k = offs_k < K
    inside_v = offs_v < V
    start, end = chunk_bounds(table, chunk)
    document, first = chunk_document(table, chunk)
    tile = offs_k[:, None] * V + offs_v[None, :]
    inside = inside_k[:, None] & inside_v[None, :]
    size = H * K * V
    before = states + (chunk.to(tl.int64) - 1) * 2 * size + head * K * V + tile
    mean = tl.load(before, mask=inside & (first == 0), other=0.0)
    importance = tl.load(before + size, mask=inside & (first == 0), other=0.0)
    if HAS_INITIAL:
        given = initial + document * 2 * size + head * K * V + tile
        mean += tl.load(given, mask=inside & (first == 1), other=0.0)
        importance += tl.load(given + size, mask=inside & (first == 1), other=0.0)
    prior_h = tl.load(prior + head)
    q += start * stride_q + (head // heads_per_group) * K
    k += start * stride_k + (head // heads_per_group) * K
    v += start * stride_v + head * V
    beta += start * stride_beta + head * V
    y += start * H * V + head * V
    scalar_at = start * H + head
    length = (end - start).to(tl.int32)
    spans = tl.load(counts + chunk.to(tl.int64) * H + head)
    if spans == 0:
        for i in tl.range(0, length, num_stages=STAGES):
            alpha = tl.exp(tl.load(log_alpha + scalar_at + i * H))
            key = tl.load(k + i * stride_k + offs_k, mask=inside_k, other=0.0).to(tl.float32)
            query = tl.load(q + i * stride_q + offs_k, mask=inside_k, other=0.0).to(tl.float32)
            value = tl.load(v + i * stride_v + offs_v, mask=inside_v, other=0.0).to(tl.float32)
            precision = tl.load(beta + i * stride_beta + offs_v, mask=inside_v, other=0.0).to(tl.float32)
            mean = mean * alpha + key[:, None] * value[None, :]
            importance = importance * alpha + (key * key)[:, None] * precision[None, :]
            out = tl.sum(mean * fast_reciprocal(importance + prior_h) * query[:, None], axis=0) * scale
            tl.store(y + i * H * V + offs_v, out.to(y.dtype.element_ty), mask=inside_v)
    else:
        span_starts = starts + chunk.to(tl.int64) * slots * H + head
        for n in range(0, spans):
            span_start = tl.load(span_starts + n * H)
            span_end = length
            if n + 1 < spans:
                span_end = tl.load(span_starts + (n + 1) * H)
            factor = tl.load(rescale + scalar_at + span_start * H)
            mean *= factor
            importance *= factor
            for i in tl.range(span_start, span_end, num_stages=STAGES):
                inverse = tl.load(inv_a + scalar_at + i * H)
                key = tl.load(k + i * stride_k + offs_k, mask=inside_k, other=0.0).to(tl.float32)
                query = tl.load(q + i * stride_q + offs_k, mask=inside_k, other=0.0).to(tl.float32)
                value = tl.load(v + i * stride_v + offs_v, mask=inside_v, other=0.0).to(tl.float32)
                precision = tl.load(beta + i * stride_beta + offs_v, mask=inside_v, other=0.0).to(tl.float32)
                mean += key[:, None] * (value * inverse)[None, :]
                importance += (key * key)[:, None] * (precision * inverse)[None, :]
                posterior_mean = mean * fast_reciprocal(importance + prior_h * inverse)
                out = tl.sum(posterior_mean * query[:, None], axis=0) * scale
                tl.store(y + i * H * V + offs_v, out.to(y.dtype.element_ty), mask=inside_v)


def readout(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_alpha: Tensor, spans: Spans, prior: Tensor, scale: float,
    states: Tensor, initial: Tensor | None, chunks: Chunks, y: Tensor,
) -> None:  # fmt: skip
    """Write y_t = scale * (M_t / (prior + Ibar_t)) @ q_t for the tokens of all chunks."""
    groups, key_dim = k.shape[2:]
    heads, value_dim = v.shape[2:]
    block_k = triton.next_power_of_2(key_dim)
    block_v = min(ELEMENTS // block_k, triton.next_power_of_2(value_dim))
    grid = (chunks.places, triton.cdiv(value_dim, block_v), heads)
    readout_kernel[grid](
        q, k, v, beta, log_alpha, spans.inv_a, spans.rescale, spans.starts, spans.counts, chunks.table, states,
        states if initial is None else initial, prior, y, scale, spans.slots, heads, heads // groups,
        q.stride(1), k.stride(1), v.stride(1), beta.stride(1),
        K=key_dim, V=value_dim, BLOCK_K=block_k, BLOCK_V=block_v, HAS_INITIAL=initial is not None, STAGES=STAGES,
        num_warps=1,
    )  # fmt: skip
