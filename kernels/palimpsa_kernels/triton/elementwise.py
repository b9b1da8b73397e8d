"""Launches the elementwise part of Palimpsa's backward pass and sums the parts of its gradients."""

import functools
import logging
import re
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from palimpsa_kernels.triton.adjoint import adjoint_kernel
from palimpsa_kernels.triton.chunks import Chunks
from palimpsa_kernels.triton.decay import Spans
from palimpsa_kernels.triton.launches import cdiv, next_power_of_2
from palimpsa_kernels.triton.primitives import chunk_bounds, row_lanes
from palimpsa_kernels.triton.targets import adjoint_tiles, capability
from palimpsa_kernels.triton.tiles import in_pairs, pack_query_key

logger = logging.getLogger("palimpsa_kernels")

ELEMENTS = 1024  # of one state in the registers of a program's one warp
PROGRAMS_PER_PROCESSOR = 8
STAGES = 4
DENSE_STAGES = 2
DENSE_BLOCK = 16  # tokens
WALK = 16  # tokens of a matrix product between waypoints

PARTS_BYTES = 1 << 30  # of the parts of dq and dk that exist at a time, about


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
    """BLOCK_K and BLOCK_V: at most ELEMENTS, few parts of gradients, and little padding.

    A quarter of 64 keys as padding costs less than tiles of half the elements.
    """
    for tile in adjoint_tiles(target):
        fits = key_dim % tile[0] == 0 or (tile[0] == 64 and key_dim % 64 >= 48)
        if fits and value_dim % tile[1] == 0:
            return tile
    block_k = 64 if key_dim % 64 == 0 else 16 if key_dim % 16 == 0 else min(64, next_power_of_2(key_dim))
    return block_k, max(1, min(ELEMENTS // block_k, next_power_of_2(value_dim)))


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


@functools.cache
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
    """Run `adjoint_kernel` over all chunks, as many at a time as keeps the parts of dq and dk at about PARTS_BYTES.

    The sum over a group's heads and the blocks of V goes to dq in v's dtype and to dk [B, T, G, K] in fp32.
    """
    batch, tokens, groups, key_dim = k.shape
    heads, value_dim = v.shape[2:]
    target = capability(q.device)
    block_k, block_v = tile_of(key_dim, value_dim, target)
    parts_k, parts_v = cdiv(key_dim, block_k), cdiv(value_dim, block_v)
    parts = parts_k * parts_v
    part_dtype = torch.float32 if v.dtype == torch.float32 else torch.bfloat16

    # The scale of dy goes along with q.
    qk = pack_query_key(q, k, scale)
    sharing = heads // groups * parts_v
    even = key_dim % block_k == 0 and value_dim % block_v == 0
    exact = not (value_dim % block_v == 0 and (block_k, block_v) in adjoint_tiles(target) and in_pairs(v, beta, dy))
    rows = block_k // row_lanes(block_k, block_v)
    row_length = cdiv(key_dim, rows) * rows
    row_bytes = 2 * chunks.size * heads * parts_v * row_length * part_dtype.itemsize
    # Of equal size: a short last one would take as long as its longest chunk.
    at_once = cdiv(chunks.places, max(1, round(chunks.places * row_bytes / PARTS_BYTES)))
    row_parts = torch.empty(
        at_once, chunks.size, heads, parts_v, 2, row_length, device=q.device, dtype=part_dtype
    )  # fmt: skip
    programs = min(at_once * heads * parts, PROGRAMS_PER_PROCESSOR * processors(q.device))
    slots = DENSE_BLOCK // 2 + max(cdiv(chunks.size, DENSE_BLOCK), spans.slots)
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

    def launch(first_chunk: int, count: int, exact: bool, dense: bool) -> Any:
        work = count * heads * parts
        return adjoint_kernel[(min(work, programs),)](
            qk, k, v, beta, dy, log_alpha, spans.inv_a, spans.rescale, spans.starts, spans.counts, spans.any_dense,
            chunks.table, states, states if initial is None else initial, prior, row_parts, dv_parts, dbeta_parts,
            dlog_alpha_parts, dlog_alpha_parts if dprior_parts is None else dprior_parts, adjoints, scratch,
            torch.zeros(1, device=q.device, dtype=torch.int32), work, first_chunk, chunks.size, slots, spans.slots,
            heads, heads // groups, qk.stride(1), k.stride(1), v.stride(1), beta.stride(1), dy.stride(1),
            K=key_dim, V=value_dim, BLOCK_K=block_k, BLOCK_V=block_v, HAS_INITIAL=initial is not None,
            PRIOR_GRADIENT=prior_gradient, EXACT=exact, EVEN=even,
            STAGES=DENSE_STAGES if dense else STAGES, WALK=WALK, DENSE=dense, DENSE_BLOCK=DENSE_BLOCK, num_warps=1,
        )  # fmt: skip

    for first_chunk in range(0, chunks.places, at_once):
        count = min(at_once, chunks.places - first_chunk)
        for dense in (False, True):
            kernel = launch(first_chunk, count, exact, dense)
            if not exact and kernel is not None and not layout_fits(kernel, block_v):
                exact = True
                launch(first_chunk, count, exact, dense)
        sum_parts_kernel[(count * chunks.size, groups)](
            row_parts, chunks.table, dq, dk, scale, first_chunk, chunks.size, groups,
            K=key_dim, PARTS=sharing, ROWS=rows, BLOCK_K=next_power_of_2(key_dim),
            BLOCK_P=min(32, next_power_of_2(sharing)), num_warps=4 if sharing > 16 else 1,
        )  # fmt: skip
    return ElementwiseGradients(dq, dk, dv_parts, dbeta_parts, dlog_alpha_parts, dprior_parts, adjoints)
