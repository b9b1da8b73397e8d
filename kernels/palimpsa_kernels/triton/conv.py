"""Depthwise causal convolution that starts anew at each document, forward and backward.

For the backward pass the inputs are kept; what the activation took in is computed anew.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from palimpsa_kernels.triton.launches import cdiv, shared_by_layers, tokens_adjacent

BLOCK_T = 32
BLOCK_D = 64
WALK = {"BLOCK_T": 128, "BLOCK_D": 128, "STAGES": 3, "num_warps": 1}
"""Of the backward pass, whose programs go through their tokens one by one."""


@triton.jit(do_not_specialize=["documents"])
def place_kernel(offsets, place, document, documents, tokens, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.zeros([BLOCK], tl.int32)
    start = tl.zeros([BLOCK], tl.int64)
    for base in range(0, documents, BLOCK_N):
        n = base + tl.arange(0, BLOCK_N)
        end = tl.load(offsets + n + 1, mask=n < documents, other=0).to(tl.int64)
        behind = (end[None, :] <= t[:, None]) & (n < documents)[None, :]
        index += tl.sum(behind.to(tl.int32), axis=1)
        start = tl.maximum(start, tl.max(tl.where(behind, end[None, :], 0), axis=1))
    inside = t < tokens
    tl.store(document + t, index, mask=inside)
    tl.store(place + t, tl.where(index < documents, t - start, -1).to(tl.int32), mask=inside)


@triton.jit
def tap(x, initial, t, place, document, back, stride, D, offs, inside, W: tl.constexpr, HAS_INITIAL: tl.constexpr):
    """The inputs `back` tokens before t, from the document's initial state where the document does not reach so far."""
    own = tl.load(
        x + (t - back)[:, None] * stride + offs[None, :], mask=inside & (place >= back)[:, None], other=0.0
    ).to(tl.float32)  # fmt: skip
    if HAS_INITIAL:
        at = (document.to(tl.int64)[:, None] * D + offs[None, :]) * (W - 1) + (W - 1 - back + place)[:, None]
        own += tl.load(initial + at, mask=inside & (place < back)[:, None], other=0.0).to(tl.float32)
    return own


@triton.jit
def convolved(
    x, weight, bias, initial, t, place, document, stride, D, offs, inside,
    W: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr,
):  # fmt: skip
    total = tl.zeros([inside.shape[0], inside.shape[1]], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + offs, mask=offs < D, other=0.0).to(tl.float32)[None, :]
    for w in tl.static_range(W):
        taps = tl.load(weight + offs * W + w, mask=offs < D, other=0.0).to(tl.float32)
        total += taps[None, :] * tap(x, initial, t, place, document, W - 1 - w, stride, D, offs, inside, W, HAS_INITIAL)
    return total


@triton.jit(do_not_specialize=["tokens"])
def conv_kernel(
    x, weight, bias, initial, place, document, y, tokens, D, stride,
    W: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    at_place = tl.load(place + t, mask=t < tokens, other=-1)
    at_document = tl.load(document + t, mask=t < tokens, other=0)
    stored = (t < tokens)[:, None] & (offs < D)[None, :]
    inside = stored & (at_place >= 0)[:, None]
    out = convolved(
        x, weight, bias, initial, t, at_place, at_document, stride, D, offs, inside, W, HAS_BIAS, HAS_INITIAL
    )
    if SILU:
        out = out * tl.sigmoid(out)
    out = tl.where(inside, out, 0.0)
    tl.store(y + t[:, None] * D + offs[None, :], out.to(y.dtype.element_ty), mask=stored)


@triton.jit
def joined(row, value):
    return row + (value,)  # noqa: RUF005 - the compiler knows no unpacking


@triton.jit
def pushed(new, row, W: tl.constexpr):
    """`new` in front of the first W - 1 of `row`."""
    out = (new,)
    for w in tl.static_range(W - 1):
        out = joined(out, row[w])
    return out


@triton.jit
def zeros(W: tl.constexpr, BLOCK_D: tl.constexpr):
    out = (tl.zeros([BLOCK_D], tl.float32),)
    for _w in tl.static_range(W - 1):
        out = joined(out, tl.zeros([BLOCK_D], tl.float32))
    return out


@triton.jit
def in_reach(window, initial, place, document, D, offs, exists, W: tl.constexpr, HAS_INITIAL: tl.constexpr):
    """Of the last W inputs, newest first, those of the document; before its start its initial state."""
    out = (tl.where(place >= 0, window[0], 0.0),)
    for back in tl.static_range(1, W):
        own = tl.where(place >= back, window[back], 0.0)
        if HAS_INITIAL:
            at = (document.to(tl.int64) * D + offs) * (W - 1) + W - 1 - back + place
            own += tl.load(initial + at, mask=exists & (place >= 0) & (place < back), other=0.0).to(tl.float32)
        out = joined(out, own)
    return out


@triton.jit(do_not_specialize=["tokens"])
def conv_gradient_kernel(
    x, weight, bias, initial, place, document, dy, dx, parts, tokens, D, stride, stride_dy,
    W: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Walks through a block of tokens and the W - 1 behind it, whose outputs reach back into it.

    `parts` [blocks, D * W + D] takes the block's share of the gradients to weight and bias.
    """
    block = tl.program_id(0).to(tl.int64)
    start = block * BLOCK_T
    offs = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    exists = offs < D
    taps = zeros(W, BLOCK_D)
    window = zeros(W, BLOCK_D)
    for w in tl.static_range(W):  # both end up with the newest in front
        taps = pushed(tl.load(weight + offs * W + w, mask=exists, other=0.0).to(tl.float32), taps, W)
        before = start - W + w
        row = tl.load(x + before * stride + offs, mask=exists & (before >= 0) & (before < tokens), other=0.0)
        window = pushed(row.to(tl.float32), window, W)
    shift = tl.zeros([BLOCK_D], tl.float32)
    if HAS_BIAS:
        shift += tl.load(bias + offs, mask=exists, other=0.0).to(tl.float32)
    dx_rows = zeros(W, BLOCK_D)
    dweight = zeros(W, BLOCK_D)
    dbias = tl.zeros([BLOCK_D], tl.float32)
    length = tl.minimum(tokens - start, BLOCK_T).to(tl.int32)
    for i in tl.range(0, length + W - 1, num_stages=STAGES):
        t = start + i
        here = t < tokens
        at_place = tl.load(place + t, mask=here, other=-1)
        at_document = tl.load(document + t, mask=here, other=0)
        row = tl.load(x + t * stride + offs, mask=exists & here, other=0.0)
        d_out = tl.load(dy + t * stride_dy + offs, mask=exists & here, other=0.0).to(tl.float32)
        window = pushed(row.to(tl.float32), window, W)
        inputs = in_reach(window, initial, at_place, at_document, D, offs, exists, W, HAS_INITIAL)
        gradient = tl.where(at_place >= 0, d_out, 0.0)
        if SILU:
            out = shift
            for back in tl.static_range(W):
                out += taps[back] * inputs[back]
            gate = tl.sigmoid(out)
            gradient *= gate * (1 + out * (1 - gate))
        # The gradients to the last W inputs, newest first; the oldest is complete.
        dx_rows = pushed(tl.zeros([BLOCK_D], tl.float32), dx_rows, W)
        reached = (dx_rows[0] + taps[0] * gradient,)
        own = tl.where(i < length, gradient, 0.0)
        summed = (dweight[0] + own * inputs[0],)
        for back in tl.static_range(1, W):
            reached = joined(reached, dx_rows[back] + tl.where(at_place >= back, taps[back] * gradient, 0.0))
            summed = joined(summed, dweight[back] + own * inputs[back])
        dx_rows = reached
        dweight = summed
        dbias += own
        oldest = t - (W - 1)
        stored = exists & (i >= W - 1) & (oldest < tokens)
        tl.store(dx + oldest * D + offs, dx_rows[W - 1].to(dx.dtype.element_ty), mask=stored)
    for back in tl.static_range(W):
        tl.store(parts + block * D * (W + 1) + offs * W + W - 1 - back, dweight[back], mask=exists)
    tl.store(parts + block * D * (W + 1) + D * W + offs, dbias, mask=exists)


@triton.jit
def final_kernel(
    x, initial, offsets, final, D, stride,
    W: tl.constexpr, HAS_INITIAL: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    document = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    start = tl.load(offsets + document).to(tl.int64)
    length = tl.load(offsets + document + 1).to(tl.int64) - start
    for m in tl.static_range(W - 1):
        place = length - (W - 1) + m
        value = tl.load(x + (start + place) * stride + offs, mask=(offs < D) & (place >= 0), other=0.0)
        if HAS_INITIAL:
            at = (document * D + offs) * (W - 1) + W - 1 + place
            value += tl.load(initial + at, mask=(offs < D) & (place < 0), other=0.0).to(value.dtype)
        tl.store(final + (document * D + offs) * (W - 1) + m, value, mask=offs < D)


@triton.jit
def border_gradient_kernel(
    x, weight, bias, initial, offsets, dy, dfinal, dx, dinitial, D, stride, stride_dy,
    W: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    document = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = offs < D
    start = tl.load(offsets + document).to(tl.int64)
    length = tl.load(offsets + document + 1).to(tl.int64) - start
    for m in tl.static_range(W - 1):
        # Input m of the initial state meets weight w at place m - w of the document.
        total = tl.zeros([BLOCK_D], tl.float32)
        if HAS_INITIAL:
            for w in tl.static_range(m + 1):
                place = tl.full([1], m - w, tl.int32)
                t = start + place.to(tl.int64)
                row = inside[None, :] & (place < length)[:, None]
                gradient = tl.load(dy + t[:, None] * stride_dy + offs[None, :], mask=row, other=0.0).to(tl.float32)
                if SILU:
                    which = document.to(tl.int32) + tl.zeros([1], tl.int32)
                    out = convolved(
                        x, weight, bias, initial, t, place, which, stride, D, offs, row, W, HAS_BIAS, HAS_INITIAL
                    )
                    gate = tl.sigmoid(out)
                    gradient *= gate * (1 + out * (1 - gate))
                taps = tl.load(weight + offs * W + w, mask=inside, other=0.0).to(tl.float32)
                total += tl.sum(gradient * taps[None, :], axis=0)
            if HAS_FINAL:
                at = m - length
                total += tl.load(
                    dfinal + (document * D + offs) * (W - 1) + at, mask=inside & (at >= 0), other=0.0
                ).to(tl.float32)  # fmt: skip
            tl.store(dinitial + (document * D + offs) * (W - 1) + m, total, mask=inside)
        if HAS_FINAL:
            place_x = length - (W - 1) + m
            at_x = dx + (start + place_x) * D + offs
            mask = inside & (place_x >= 0)
            given = tl.load(dfinal + (document * D + offs) * (W - 1) + m, mask=mask, other=0.0).to(tl.float32)
            own = tl.load(at_x, mask=mask, other=0.0).to(tl.float32)
            tl.store(at_x, (own + given).to(dx.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class Places:
    """Attributes:
    offsets: of the documents in the flat list of tokens [N + 1].
    place: each token's place in its document, -1 behind the last [B * T] int32.
    document: [B * T] int32.
    """

    offsets: Tensor
    place: Tensor
    document: Tensor


def make_places(batch: int, tokens: int, cu_seqlens: Tensor | None, device: torch.device) -> Places:
    """Where each token lies; rows without cu_seqlens are documents."""
    offsets = cu_seqlens
    if offsets is None:
        offsets = torch.arange(batch + 1, device=device, dtype=torch.int64) * tokens

    def make() -> tuple[Tensor, Tensor]:
        place = torch.empty(batch * tokens, device=device, dtype=torch.int32)
        document = torch.empty_like(place)
        if batch * tokens:
            place_kernel[(cdiv(batch * tokens, 64),)](
                offsets, place, document, offsets.shape[0] - 1, batch * tokens, BLOCK=64, BLOCK_N=64
            )
        return place, document

    return Places(offsets, *shared_by_layers(cu_seqlens, ("places", tokens), make))


class CausalConv1d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor | None,
        activation: str | None, output_final_state: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        batch, tokens, dim = x.shape
        width = weight.shape[1]
        x, weight = tokens_adjacent(x), weight.contiguous()
        initial = None if initial is None else initial.contiguous()
        places = make_places(batch, tokens, cu_seqlens, x.device)
        ctx.options = {
            "W": width,
            "HAS_BIAS": bias is not None,
            "HAS_INITIAL": initial is not None,
            "SILU": activation == "silu",
        }
        y = torch.empty(x.shape, device=x.device, dtype=x.dtype)
        blocks = cdiv(dim, BLOCK_D)
        conv_kernel[(cdiv(batch * tokens, BLOCK_T), blocks)](
            x, weight, x if bias is None else bias, x if initial is None else initial, places.place, places.document, y,
            batch * tokens, dim, x.stride(1), BLOCK_T=BLOCK_T, BLOCK_D=BLOCK_D, **ctx.options,
        )  # fmt: skip
        final = None
        if output_final_state:
            final = torch.empty(places.offsets.shape[0] - 1, dim, width - 1, device=x.device, dtype=x.dtype)
            final_kernel[(len(final), blocks)](
                x, x if initial is None else initial, places.offsets, final, dim, x.stride(1),
                W=width, HAS_INITIAL=initial is not None, BLOCK_D=BLOCK_D,
            )  # fmt: skip
        ctx.save_for_backward(x, weight, bias, initial)
        ctx.places = places
        ctx.set_materialize_grads(False)
        return y, final

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias, initial = ctx.saved_tensors
        dy, dfinal = grads
        places: Places = ctx.places
        batch, tokens, dim = x.shape
        dy = torch.zeros_like(x) if dy is None else tokens_adjacent(dy)
        dx = torch.empty(x.shape, device=x.device, dtype=x.dtype)
        rows, blocks = cdiv(batch * tokens, WALK["BLOCK_T"]), cdiv(dim, WALK["BLOCK_D"])
        parts = torch.empty(rows, weight.numel() + dim, device=x.device)
        given = x if bias is None else bias, x if initial is None else initial
        conv_gradient_kernel[(rows, blocks)](
            x, weight, *given, places.place, places.document, dy, dx, parts,
            batch * tokens, dim, x.stride(1), dy.stride(1), **WALK, **ctx.options,
        )  # fmt: skip
        dinitial = None if initial is None else torch.empty_like(initial)
        if initial is not None or dfinal is not None:
            border_gradient_kernel[(places.offsets.shape[0] - 1, cdiv(dim, BLOCK_D))](
                x, weight, *given, places.offsets, dy, x if dfinal is None else dfinal.contiguous(), dx,
                x if dinitial is None else dinitial, dim, x.stride(1), dy.stride(1),
                HAS_FINAL=dfinal is not None, BLOCK_D=BLOCK_D, **ctx.options,
            )  # fmt: skip
        dweight, dbias = parts.sum(0).to(weight.dtype).split([weight.numel(), dim])
        return dx, dweight.view(weight.shape), None if bias is None else dbias, dinitial, None, None, None


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None = "silu",
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `palimpsa_kernels.causal_conv1d`."""
    y, state = CausalConv1d.apply(x, weight, bias, initial_state, cu_seqlens, activation, output_final_state)
    return (y, state) if output_final_state else y
