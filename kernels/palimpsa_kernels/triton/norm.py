"""Gated RMSNorm in Triton; formulas in `palimpsa_kernels.norm`.

Programs take rows of one segment, which is a group or this rank's part of one. Where groups span ranks, kernels of
their own form a segment's sums first. Backward, with n channels in a group and r = 1 / sqrt(mean of g^2 + eps):

    dg = r * weight * dy - g * r^3 / n * (sum of weight * dy * g over the group)         dweight = sum of dy * g * r
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from palimpsa_kernels.norm import Total
from palimpsa_kernels.triton.launches import cdiv, next_power_of_2

ROWS = 32  # of a program of the backward pass, whose sums over rows are stored
ELEMENTS = 4096  # that a program holds at a time, unless a segment has more channels


@triton.jit
def gated_tile(x, z, row, mask, offs, stride_x, stride_z, GATED: tl.constexpr):
    """g, and x, z and sigmoid(z) (nothing, where there is no gate), in fp32."""
    given = tl.load(x + row[:, None] * stride_x + offs[None, :], mask=mask, other=0.0).to(tl.float32)
    if GATED:
        gate = tl.load(z + row[:, None] * stride_z + offs[None, :], mask=mask, other=0.0).to(tl.float32)
        share = tl.sigmoid(gate)
        gated = given * gate * share
    else:
        gate, share, gated = given, given, given
    return gated, given, gate, share


@triton.jit
def segment_of(first, size, BLOCK_C: tl.constexpr):
    """Channels of this program's segment, whether each exists, and the segment's number among equal ones."""
    number = tl.program_id(1)
    within = tl.arange(0, BLOCK_C)
    return first + number * size + within, within < size, number


@triton.jit
def weighted(dy, weight, at, mask, offs, exists):
    """dy, and weight * dy, in fp32."""
    d_out = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
    return d_out, d_out * tl.load(weight + offs, mask=exists, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["rows", "segment"])
def norm_kernel(
    x, z, weight, squares, scales, out, rows, first, size, segment, segments, group_size, eps, C, stride_x, stride_z,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, GATED: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = row < rows
    offs, exists, number = segment_of(first, size, BLOCK_C)
    mask = inside[:, None] & exists[None, :]
    place = row * segments + segment + number
    gated, _x, _z, _share = gated_tile(x, z, row, mask, offs, stride_x, stride_z, GATED)
    square = tl.load(squares + place, mask=inside, other=0.0) if GIVEN else tl.sum(gated * gated, axis=1)
    scale = tl.rsqrt(square / group_size + eps)
    tl.store(scales + place, scale, mask=inside)
    factor = tl.load(weight + offs, mask=exists, other=0.0).to(tl.float32)
    y = gated * scale[:, None] * factor[None, :]
    tl.store(out + row[:, None] * C + offs[None, :], y.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "segment"])
def sum_kernel(
    x, z, weight, dy, sums, rows, first, size, segment, segments, C, stride_x, stride_z,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, GATED: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """A segment's sum of g^2, or of weight * dy * g."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = row < rows
    offs, exists, number = segment_of(first, size, BLOCK_C)
    mask = inside[:, None] & exists[None, :]
    gated, _x, _z, _share = gated_tile(x, z, row, mask, offs, stride_x, stride_z, GATED)
    other = gated
    if BACKWARD:
        other = weighted(dy, weight, row[:, None] * C + offs[None, :], mask, offs, exists)[1]
    tl.store(sums + row * segments + segment + number, tl.sum(gated * other, axis=1), mask=inside)


@triton.jit(do_not_specialize=["rows", "segment"])
def norm_gradient_kernel(
    x, z, weight, scales, dots, dy, dx, dz, dweight_parts, rows, first, size, segment, segments, group_size, C,
    stride_x, stride_z,
    ROWS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, GATED: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    offs, exists, number = segment_of(first, size, BLOCK_C)
    dweight = tl.zeros([BLOCK_C], tl.float32)
    for base in range(0, ROWS, BLOCK_R):
        row = block * ROWS + base + tl.arange(0, BLOCK_R)
        inside = row < rows
        mask = inside[:, None] & exists[None, :]
        place = row * segments + segment + number
        at = row[:, None] * C + offs[None, :]
        scale = tl.load(scales + place, mask=inside, other=0.0)
        if GIVEN:
            dot = tl.load(dots + place, mask=inside, other=0.0)
        else:
            gated, _x, _z, _share = gated_tile(x, z, row, mask, offs, stride_x, stride_z, GATED)
            dot = tl.sum(gated * weighted(dy, weight, at, mask, offs, exists)[1], axis=1)
        back = dot * scale * scale * scale / group_size
        # Loaded again, out of the cache: held across the sum, the row would not fit into the registers.
        gated, given, gate, share = gated_tile(x, z, row, mask, offs, stride_x, stride_z, GATED)
        d_out, d_normed = weighted(dy, weight, at, mask, offs, exists)
        dweight += tl.sum(d_out * gated * scale[:, None], axis=0)
        d_gated = d_normed * scale[:, None] - gated * back[:, None]
        if GATED:
            d_gate = d_gated * given * share * (1.0 + gate * (1.0 - share))
            tl.store(dz + at, d_gate.to(dz.dtype.element_ty), mask=mask)
            d_gated *= gate * share
        tl.store(dx + at, d_gated.to(dx.dtype.element_ty), mask=mask)
    tl.store(dweight_parts + block * C + offs, dweight, mask=exists)


def block_sizes(size: int) -> dict[str, int]:
    """Compile-time sizes, and warps, for segments of so many channels."""
    block = next_power_of_2(size)
    rows = max(1, min(ROWS, ELEMENTS // block))
    return {"BLOCK_R": rows, "BLOCK_C": block, "num_warps": max(1, min(16, rows * block // 512))}


def launches(sizes: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """First channel, size, number of the first segment and number of segments of each run of equal segments."""
    first = number = 0
    while number < len(sizes):
        count = 1
        while number + count < len(sizes) and sizes[number + count] == sizes[number]:
            count += 1
        yield first, sizes[number], number, count
        first, number = first + count * sizes[number], number + count


def rows_of(x: Tensor) -> Tensor:
    """x [..., C] as [rows, C] with adjacent channels."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


def group_sums(
    x: Tensor, z: Tensor | None, weight: Tensor, dy: Tensor | None, sizes: Sequence[int], total: Total,
    shape: Sequence[int],
) -> Tensor:  # fmt: skip
    """Over whole groups [rows, segments]: of g^2 without dy, else of weight * dy * g; `shape` is what y has."""
    sums = torch.empty(len(x), len(sizes), device=x.device)
    gate = x if z is None else z
    for first, size, number, count in launches(sizes):
        options = block_sizes(size)
        sum_kernel[(cdiv(len(x), options["BLOCK_R"]), count)](
            x, gate, weight, x if dy is None else dy, sums, len(x), first, size, number, len(sizes), x.shape[1],
            x.stride(0), gate.stride(0), GATED=z is not None, BACKWARD=dy is not None, **options,
        )  # fmt: skip
    return total(sums.view(*shape[:-1], len(sizes))).reshape(sums.shape).contiguous()


class GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, z: Tensor | None, weight: Tensor, eps: float, group_size: int, sizes: Sequence[int],
        total: Total | None,
    ) -> Tensor:  # fmt: skip
        shape, (x, weight) = x.shape, (rows_of(x), weight.contiguous())
        z = None if z is None else rows_of(z)
        rows, channels = x.shape
        scales = torch.empty(rows, len(sizes), device=x.device)
        out = torch.empty(shape, device=x.device, dtype=weight.dtype)
        ctx.save_for_backward(x, z, weight, scales)
        ctx.settings = group_size, sizes, total
        squares = scales if total is None else group_sums(x, z, weight, None, sizes, total, shape)
        gate = x if z is None else z
        for first, size, number, count in launches(sizes):
            options = block_sizes(size)
            norm_kernel[(cdiv(rows, options["BLOCK_R"]), count)](
                x, gate, weight, squares, scales, out, rows, first, size, number, len(sizes), group_size, eps,
                channels, x.stride(0), gate.stride(0), GATED=z is not None, GIVEN=total is not None, **options,
            )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, z, weight, scales = ctx.saved_tensors
        group_size, sizes, total = ctx.settings
        rows, channels = x.shape
        dy = rows_of(grads[0]).contiguous()
        shape = grads[0].shape
        dx = torch.empty(shape, device=x.device, dtype=x.dtype)
        dz = None if z is None else torch.empty(shape, device=x.device, dtype=z.dtype)
        blocks = cdiv(rows, ROWS)
        dweight_parts = torch.empty(blocks, channels, device=x.device)
        dots = scales if total is None else group_sums(x, z, weight, dy, sizes, total, shape)
        gate = x if z is None else z
        for first, size, number, count in launches(sizes):
            norm_gradient_kernel[(blocks, count)](
                x, gate, weight, scales, dots, dy, dx, dx if dz is None else dz, dweight_parts, rows, first, size,
                number, len(sizes), group_size, channels, x.stride(0), gate.stride(0),
                ROWS=ROWS, GATED=z is not None, GIVEN=total is not None, **block_sizes(size),
            )  # fmt: skip
        dweight = dweight_parts.sum(0).to(weight.dtype)
        return dx, dz, dweight, None, None, None, None


def gated_rms_norm(
    x: Tensor,
    z: Tensor | None,
    weight: Tensor,
    *,
    eps: float,
    group_size: int,
    segments: Sequence[int] | None,
    total: Total | None,
) -> Tensor:
    """See `palimpsa_kernels.gated_rms_norm`."""
    sizes = segments or [group_size] * (x.shape[-1] // group_size)
    return GatedRMSNorm.apply(x, z, weight, eps, group_size, sizes, total)
