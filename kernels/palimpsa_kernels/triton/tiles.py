"""Tiles of the states in registers, and the rows of tokens that go with them.

A tile's rows are held in an order in which each thread has neighbouring ones (`tile_order`): it then reads q and k, and
writes their gradients, several at a time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from palimpsa_kernels.triton.launches import cdiv
from palimpsa_kernels.triton.primitives import row_lanes

BLOCK_T, BLOCK_C = 8, 128


@triton.jit
def load_row(pointer, mask, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointer).to(tl.float32)
    else:
        return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_columns(pointer, mask, BLOCK_V: tl.constexpr, EVEN: tl.constexpr, PAIRS: tl.constexpr):
    """v, beta or dy of a token from `pointer` on; with PAIRS two bf16 at a time from an even address."""
    if PAIRS:
        # Single bf16 are too short for the asynchronous copies of a pipelined loop.
        pairs = tl.load(pointer.to(tl.pointer_type(tl.int32), bitcast=True) + tl.arange(0, BLOCK_V // 2))
        return tl.reshape(tl.join(pairs << 16, pairs & -65536), [BLOCK_V]).to(tl.float32, bitcast=True)
    else:
        return load_row(pointer + tl.arange(0, BLOCK_V), mask, EVEN)


@triton.jit
def load_query_key(pointer, mask, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, EVEN: tl.constexpr):
    """q and k of a token in the order of the tile's rows, from pairs [BLOCK_K, 2]."""
    query, key = tl.split(load_row(pointer, mask, EVEN))
    return tile_order(query, BLOCK_K, BLOCK_V), tile_order(key, BLOCK_K, BLOCK_V)


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
def tile_order(row, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """A row [BLOCK_K] in the order of the tile's rows, which lie on lanes first: neighbours belong to one thread."""
    LANES: tl.constexpr = row_lanes(BLOCK_K, BLOCK_V)
    return tl.reshape(tl.trans(tl.reshape(row, [LANES, BLOCK_K // LANES])), [BLOCK_K])


@triton.jit
def tile_offsets(part, head, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """Offsets of a part of a head's state [H, K, V] in the order of the tile, and which of them are in the state."""
    PARTS_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    offs_k = tile_order((part // PARTS_V) * BLOCK_K + tl.arange(0, BLOCK_K), BLOCK_K, BLOCK_V)
    offs_v = (part % PARTS_V) * BLOCK_V + tl.arange(0, BLOCK_V)
    return head * K * V + offs_k[:, None] * V + offs_v[None, :], (offs_k < K)[:, None] & (offs_v < V)[None, :]


@triton.jit(do_not_specialize=["tokens"])
def pack_kernel(
    q, k, qk, scale, tokens, columns, stride_q, stride_k, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    inside = (t < tokens) & (c < columns)
    query = tl.load(q + t * stride_q + c, mask=inside, other=0.0).to(tl.float32) * scale
    key = tl.load(k + t * stride_k + c, mask=inside, other=0.0).to(tl.float32)
    row = qk + ((t * columns + c) * 2)[:, :, None] + tl.arange(0, 2)[None, None, :]
    tl.store(row, tl.join(query, key), mask=inside[:, :, None] & (tl.arange(0, 2)[None, None, :] < 2))


def in_pairs(*rows: Tensor) -> bool:
    """Whether v, beta or dy [B, T, H, V] can be read two bf16 at a time (`load_columns`), from even columns on."""
    return all(x.dtype == torch.bfloat16 and x.stride(1) % 2 == 0 and x.data_ptr() % 4 == 0 for x in rows)


def pack_query_key(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """scale * q and k [B, T, G, K] as pairs [B, T, G, K, 2] in fp32, which spares each head the conversion.

    One token follows the other at a fixed stride in q and in k (`tokens_adjacent`).
    """
    batch, tokens, groups, key_dim = q.shape
    qk = torch.empty(*q.shape, 2, device=q.device, dtype=torch.float32)
    grid = (cdiv(batch * tokens, BLOCK_T), cdiv(groups * key_dim, BLOCK_C))
    pack_kernel[grid](
        q, k, qk, scale, batch * tokens, groups * key_dim, q.stride(1), k.stride(1),
        BLOCK_T=BLOCK_T, BLOCK_C=BLOCK_C, num_warps=4,
    )  # fmt: skip
    return qk
