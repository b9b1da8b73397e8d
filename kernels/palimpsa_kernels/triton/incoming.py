"""What the adjoint that enters at a chunk's end adds to the gradients: linear in it, so matrix products.

With E the incoming adjoint of M, a_t the decay from token t to the chunk's end and likewise for Ibar:

    dv_t += a_t E k_t,    dk_t += a_t E^T v_t,    dlog_alpha_t += a_0 <E, M_0> + sum_{s < t} v_s . (a_s E k_s)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from palimpsa_kernels.triton.chunks import Chunks
from palimpsa_kernels.triton.launches import cdiv, next_power_of_2
from palimpsa_kernels.triton.primitives import chunk_bounds, chunk_document, matrix_dtype
from palimpsa_kernels.triton.targets import capability, incoming_blocks, incoming_stages

HEADS_PER_PROGRAM = 32


@triton.jit(do_not_specialize=["tokens", "splits"])
def incoming_kernel(
    k, v, to_end, table, adjoints, initial, dv_parts, dv, dk_parts, inner, tokens, splits, H, G, stride_k, stride_v,
    K: tl.constexpr, V: tl.constexpr, PARTS_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, KIND: tl.constexpr, STATES: tl.constexpr, BEFORE: tl.constexpr, HAS_INITIAL: tl.constexpr,
    OPERAND: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # KIND 0 is M; 1 is Ibar, where v stands for beta and keys are squared.
    # BEFORE: the roles are q, dy and the states before the chunks instead of k, v and the incoming adjoints.
    # Pointers move to the chunk and group once; offsets inside of them are 32 bits wide.
    chunk = tl.program_id(0).to(tl.int64)
    group = tl.program_id(2) // splits
    split = tl.program_id(2) % splits
    start, end = chunk_bounds(table, chunk)
    document, first = chunk_document(table, chunk)
    start += tl.program_id(1) * BLOCK_T
    length = (end - start).to(tl.int32)
    if length > 0:
        i = tl.arange(0, BLOCK_T)
        inside = i < length
        offs_k = tl.arange(0, BLOCK_K)
        inside_k = offs_k < K
        mask_k = inside[:, None] & inside_k[None, :]
        rows_k = (k + start * stride_k + group * K) + i[:, None] * stride_k + offs_k[None, :]
        key = tl.load(rows_k, mask=mask_k, other=0.0).to(tl.float32)
        factor = key * key if KIND == 1 else key
        factor_operand = factor.to(OPERAND)
        factor_low = (factor - factor_operand.to(tl.float32)).to(OPERAND)
        dk = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
        heads_per_group = H // G
        first_head = group * heads_per_group
        v += start * stride_v + first_head * V
        dv += (start * H + first_head) * V
        dv_parts += (start * H + first_head) * PARTS_K * V
        to_end += start * H + first_head
        inner += start * H + first_head
        adjoints += (((chunk - BEFORE) * STATES + KIND) * H + first_head) * K * V
        initial += ((document * STATES + KIND) * H + first_head) * K * V
        for h in tl.range(split, heads_per_group, splits, num_stages=STAGES):
            decay = tl.exp(tl.load(to_end + i * H + h, mask=inside, other=-float("inf")))[:, None]
            product = tl.zeros([BLOCK_T], tl.float32)
            if KIND == 1:
                product += tl.load(inner + i * H + h, mask=inside, other=0.0)
            for base_v in range(0, V, BLOCK_V):
                offs_v = base_v + tl.arange(0, BLOCK_V)
                inside_v = offs_v < V
                mask_v = inside[:, None] & inside_v[None, :]
                mask = inside_k[:, None] & inside_v[None, :]
                state_at = (adjoints + h * K * V) + offs_k[:, None] * V + offs_v[None, :]
                if BEFORE:
                    adjoint = tl.load(state_at, mask=mask & (first == 0), other=0.0).to(tl.float32)
                    if HAS_INITIAL:
                        given = (initial + h * K * V) + offs_k[:, None] * V + offs_v[None, :]
                        adjoint += tl.load(given, mask=mask & (first == 1), other=0.0)
                else:
                    adjoint = tl.load(state_at, mask=mask, other=0.0)
                value_at = (v + h * V) + i[:, None] * stride_v + offs_v[None, :]
                value = tl.load(value_at, mask=mask_v, other=0.0).to(tl.float32)
                high = adjoint.to(OPERAND)
                # Also summed to log_alpha's gradient, where terms can cancel: as exact as the inputs allow, which
                # takes bf16 operands in two parts. Small terms first.
                if tl.bfloat16 == OPERAND:
                    dv_tile = tl.dot(factor_operand, (adjoint - high.to(tl.float32)).to(OPERAND))
                    if KIND == 1:
                        dv_tile = tl.dot(factor_low, high, dv_tile)
                    dv_tile = tl.dot(factor_operand, high, dv_tile)
                else:
                    dv_tile = tl.dot(factor_operand, high, input_precision="tf32x3")
                dk = tl.dot((value * decay).to(OPERAND), tl.trans(high), dk, input_precision="tf32x3")
                dv_tile *= decay
                product += tl.sum(value * dv_tile, axis=1)
                if not BEFORE:
                    part_at = (dv_parts + h * PARTS_K * V) + i[:, None] * (H * PARTS_K * V) + offs_v[None, :]
                    for part in tl.static_range(PARTS_K):
                        dv_tile += tl.load(part_at + part * V, mask=mask_v, other=0.0).to(tl.float32)
                    dv_at = (dv + h * V) + i[:, None] * (H * V) + offs_v[None, :]
                    tl.store(dv_at, dv_tile.to(dv.dtype.element_ty), mask=mask_v)
            tl.store(inner + i * H + h, product, mask=inside)
        if KIND == 1:
            # Loaded again rather than held in registers during the loop.
            dk *= 2 * tl.load(rows_k, mask=mask_k, other=0.0).to(tl.float32)
        rows = dk_parts + ((split.to(tl.int64) * tokens + start) * G + group) * K
        tl.store(rows + i[:, None] * (G * K) + offs_k[None, :], dk, mask=mask_k)


@triton.jit
def decay_gradient_kernel(
    dlog_alpha_parts, products, inner, outer, table, dlog_alpha, H,
    PARTS: tl.constexpr, BLOCK_P: tl.constexpr, PRODUCTS: tl.constexpr, STATES: tl.constexpr, BLOCK_H: tl.constexpr,
    OUTER: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = h < H
    start, end = chunk_bounds(table, chunk)
    if start < end:
        gradient = tl.zeros([BLOCK_H], tl.float32)
        for kind in tl.static_range(STATES):
            for part in range(PRODUCTS):
                at = ((chunk * STATES + kind) * H + h) * PRODUCTS + part
                gradient += tl.load(products + at, mask=inside, other=0.0)
        offs_p = tl.arange(0, BLOCK_P)
        for i in tl.range(0, (end - start).to(tl.int32), num_stages=4):
            at = (start + i) * H + h
            parts = tl.load(
                dlog_alpha_parts + at[:, None] * PARTS + offs_p[None, :],
                mask=inside[:, None] & (offs_p < PARTS)[None, :], other=0.0,
            )  # fmt: skip
            tl.store(dlog_alpha + at, gradient + tl.sum(parts, axis=1), mask=inside)
            gradient += tl.load(inner + at, mask=inside, other=0.0)
        if OUTER:
            gradient = tl.zeros([BLOCK_H], tl.float32)
            for i in range(0, (end - start).to(tl.int32)):
                at = (end - 1 - i) * H + h
                gradient += tl.load(outer + at, mask=inside, other=0.0)
                tl.store(dlog_alpha + at, tl.load(dlog_alpha + at, mask=inside, other=0.0) + gradient, mask=inside)


def add_incoming(
    k: Tensor, values: list[Tensor], to_end: Tensor, chunks: Chunks, adjoints: Tensor, parts: list[Tensor],
    dk: Tensor,
) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    """Sum the parts of dv (and dbeta) [B, T, H, parts, V] and the share of the incoming adjoints.

    `values` are v (and beta). dk [kinds, splits, B, T, G, K] fp32 takes the share of the group's heads in parts.

    Returns:
        dv (and dbeta) [B, T, H, V] in v's dtype, and v_t . dv_t (+ beta_t . dbeta_t) of the share [B, T, H] fp32.
    """
    inner = torch.empty_like(to_end)
    gradients = []
    for kind, (value, part) in enumerate(zip(values, parts, strict=True)):
        # A single part is completed in place.
        dv = part if part.shape[3] == 1 else torch.zeros(value.shape, device=value.device, dtype=value.dtype)
        launch_incoming(
            k, value, to_end, chunks, adjoints, None, part, dv, dk[kind], inner, kind=kind, before=False
        )  # fmt: skip
        gradients.append(dv.view(value.shape))
    return gradients, inner


def launch_incoming(
    k: Tensor, v: Tensor, decay: Tensor, chunks: Chunks, adjoints: Tensor, initial: Tensor | None, dv_parts: Tensor,
    dv: Tensor, dk: Tensor, inner: Tensor, *, kind: int, before: bool,
) -> None:  # fmt: skip
    """Run `incoming_kernel`; with `before` on the states before the chunks, for what they add to dk and inner alone."""
    batch, tokens, groups, key_dim = k.shape
    heads, value_dim = v.shape[2:]
    block_k = max(16, next_power_of_2(key_dim))
    target = capability(v.device)
    blocks = incoming_blocks(target, block_k, value_dim, v.dtype)
    splits = len(dk)
    grid = (chunks.places, cdiv(chunks.size, blocks["BLOCK_T"]), groups * splits)
    incoming_kernel[grid](
        k, v, decay, chunks.table, adjoints, adjoints if initial is None else initial, dv_parts, dv, dk, inner,
        batch * tokens, splits, heads, groups, k.stride(1), v.stride(1),
        K=key_dim, V=value_dim, PARTS_K=dv_parts.shape[3] if dv_parts.dim() == 5 else 1, BLOCK_K=block_k,
        KIND=kind, STATES=adjoints.shape[1], BEFORE=before, HAS_INITIAL=initial is not None,
        OPERAND=matrix_dtype(v.dtype), num_warps=8, **blocks,
        STAGES=incoming_stages(target, v.dtype, one_block=value_dim <= blocks["BLOCK_V"]),
    )  # fmt: skip


def decay_gradient(
    dlog_alpha_parts: Tensor, products: Tensor, inner: Tensor, chunks: Chunks, outer: Tensor | None = None
) -> Tensor:
    """dlog_alpha [B, T, H]: the parts [B, T, H, parts], the share of the incoming adjoints and, if the parts lack it,
    of the states before the chunks, `outer` [B, T, H] summed from each token to its chunk's end."""
    heads, parts = dlog_alpha_parts.shape[2:]
    dlog_alpha = torch.zeros_like(inner)
    decay_gradient_kernel[(chunks.places, cdiv(heads, HEADS_PER_PROGRAM))](
        dlog_alpha_parts, products, inner, inner if outer is None else outer, chunks.table, dlog_alpha, heads,
        PARTS=parts, BLOCK_P=next_power_of_2(parts), PRODUCTS=products.shape[3], STATES=products.shape[1],
        BLOCK_H=HEADS_PER_PROGRAM, OUTER=outer is not None, num_warps=1,
    )  # fmt: skip
    return dlog_alpha
