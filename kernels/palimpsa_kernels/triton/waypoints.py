"""States inside of a chunk from which the backward pass starts anew, formed by one walk forward.

Running a state backwards multiplies the error that it starts with as it does rounding errors (see `decay`): the states
behind spans have to be as exact as fp32, and divided by the same decays as backwards.
"""

import triton
import triton.language as tl

from palimpsa_kernels.triton.primitives import anew
from palimpsa_kernels.triton.tiles import load_boundary, load_columns, load_query_key, tile_order


@triton.jit
def split_tf32(x):
    """fp32 as the sum of two numbers that tensor cores take whole, within 2^-22."""
    high = (x.to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def advance(
    mean, importance, keys, inside_k, values, precisions, weights, begin, end, H, stride_k, stride_v, stride_beta,
    DENSE: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The states [BLOCK_K, BLOCK_V] behind tokens begin to end - 1, at most BLOCK, for bf16 keys, by matrix products.

    `weights` are log_alpha where the block is dense, otherwise 1 / a_t, by which the states are divided too. Rows of
    keys that are not `inside_k` [BLOCK_K, 1] are padding, unless EVEN.
    """
    t = begin + tl.arange(0, BLOCK)
    inside = t < end
    weight = tl.load(weights + t * H, mask=inside, other=0.0)
    if DENSE:
        total = tl.sum(weight)
        mean *= tl.exp(total)
        importance *= tl.exp(total)
        weight = tl.exp(total - tl.cumsum(weight))
    inside_key = inside[None, :] if EVEN else inside[None, :] & inside_k
    key = tl.load(keys + t[None, :] * stride_k, mask=inside_key, other=0.0).to(tl.float32)
    value = tl.load(values + t[:, None] * stride_v, mask=inside[:, None], other=0.0).to(tl.float32)
    high, low = split_tf32(value * weight[:, None])
    mean = tl.dot(key, high, tl.dot(key, low, mean, input_precision="tf32"), input_precision="tf32")
    precision = tl.load(precisions + t[:, None] * stride_beta, mask=inside[:, None], other=0.0).to(tl.float32)
    high, low = split_tf32(precision * weight[:, None])
    square_high, square_low = split_tf32(key * key)
    importance = tl.dot(square_high, low, importance, input_precision="tf32")
    importance = tl.dot(square_low, high, importance, input_precision="tf32")
    importance = tl.dot(square_high, high, importance, input_precision="tf32")
    return mean, importance


@triton.jit
def advance_exactly(
    mean, importance, pairs, values, precisions, weights, begin, end, H, stride_qk, stride_v, stride_beta,
    pair_mask, inside_v, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, DENSE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The same token by token in fp32, rows in the tile's order; pointers as the backward loop has them."""
    # `begin` is a value carried by the caller's loop: Triton 3.6 drops one that is used as a loop's bound alone.
    for step in tl.range(0, end - begin, num_stages=2):
        i = begin + step
        weight = tl.load(weights + i * H)
        if DENSE:
            mean *= tl.exp(weight)
            importance *= tl.exp(weight)
            weight = 1.0
        _, key = load_query_key(pairs + i * stride_qk, pair_mask, BLOCK_K, BLOCK_V, EVEN)
        value = load_columns(values + i * stride_v, inside_v, BLOCK_V, EVEN, False) * weight
        precision = load_columns(precisions + i * stride_beta, inside_v, BLOCK_V, EVEN, False) * weight
        mean += key[:, None] * value[None, :]
        importance += (key * key)[:, None] * precision[None, :]
    return mean, importance


@triton.jit
def fill_waypoints(
    waypoints, boundary, given, state_size, first, k, pairs, values, precisions, weights, rescale, span_starts, blocks,
    part, head, H, stride_k, stride_qk, stride_v, stride_beta, pair_mask, inside_v,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, WALK: tl.constexpr,
    DENSE: tl.constexpr, DENSE_BLOCK: tl.constexpr, HAS_INITIAL: tl.constexpr, EXACT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The states before each block but a chunk's first, [blocks, 2, BLOCK_K, BLOCK_V] with rows in natural order.

    Blocks are spans, whose states are divided by the decay over the span before, or have DENSE_BLOCK tokens.
    """
    TILE: tl.constexpr = BLOCK_K * BLOCK_V
    PARTS_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    columns = tl.arange(0, BLOCK_V)[None, :]
    rows = tl.arange(0, BLOCK_K)
    if EXACT:
        rows = tile_order(rows, BLOCK_K, BLOCK_V)
    rows = rows[:, None]
    natural_k = (part // PARTS_V) * BLOCK_K + rows
    natural_v = (part % PARTS_V) * BLOCK_V + columns
    tile = head * K * V + natural_k * V + natural_v
    inside = (natural_k < K) & (natural_v < V)
    mean, importance = load_boundary(boundary + tile, given + tile, state_size, inside, first, HAS_INITIAL)
    begin = 0
    for place in range(1, blocks):
        if DENSE:
            end = place * DENSE_BLOCK
        else:
            end = tl.load(span_starts + place * H)
            factor = tl.load(rescale + begin * H)
            mean *= factor
            importance *= factor
        if EXACT:
            mean, importance = advance_exactly(
                mean, importance, pairs, values, precisions, weights, begin, end, H,
                stride_qk, stride_v, stride_beta, pair_mask, inside_v, BLOCK_K, BLOCK_V, DENSE, EVEN,
            )  # fmt: skip
        elif DENSE:
            mean, importance = advance(
                mean, importance, k + natural_k, natural_k < K, values + columns, precisions + columns, weights,
                begin, end, H, stride_k, stride_v, stride_beta, DENSE, DENSE_BLOCK, EVEN,
            )  # fmt: skip
        else:
            for base in tl.range(begin, end, WALK, num_stages=1):
                mean, importance = advance(
                    mean, importance, k + natural_k, natural_k < K, values + columns, precisions + columns, weights,
                    base, end, H, stride_k, stride_v, stride_beta, DENSE, WALK, EVEN,
                )  # fmt: skip
        # Addresses that are formed here take no registers from the products.
        slot = waypoints + place * 2 * TILE + anew(rows) * BLOCK_V + columns
        tl.store(slot, mean)
        tl.store(slot + TILE, importance)
        begin = end
