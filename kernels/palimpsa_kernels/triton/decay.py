"""Decays inside of chunks, and the spans over which states can be held divided by their decay.

The scans hold M_t / a_t, a_t the product of the alphas behind an anchor, which changes by one multiply-add a token and
element; backwards it is undone by subtraction. That rounds away what has grown over: of a state before growth by G,
G * 2^-24 is lost. So each chunk and head is cut into spans, greedily, as long as tokens of equal size let
M_t / a_t grow by at most a given factor from the span's first token on, its anchor. A chunk that would need
more than one span for every GROUP tokens is dense: all its tokens are anchors, and backwards its states are computed
anew.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from palimpsa_kernels.triton.chunks import Chunks
from palimpsa_kernels.triton.launches import cdiv
from palimpsa_kernels.triton.primitives import chunk_bounds, chunk_document

GROUP = 4
HEADS_PER_PROGRAM = 32


@triton.jit
def chunk_decay_kernel(log_alpha, table, to_end, from_start, total, H, BLOCK_H: tl.constexpr, FROM_START: tl.constexpr):
    chunk = tl.program_id(0)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = h < H
    start, end = chunk_bounds(table, chunk)
    decay = tl.zeros([BLOCK_H], tl.float32)
    for i in tl.range(0, (end - start).to(tl.int32), num_stages=4):
        at = (end - 1 - i) * H + h
        tl.store(to_end + at, decay, mask=inside)
        decay += tl.load(log_alpha + at, mask=inside, other=0.0)
    tl.store(total + chunk.to(tl.int64) * H + h, decay, mask=inside)
    if FROM_START:
        decay = tl.zeros([BLOCK_H], tl.float32)
        for i in tl.range(0, (end - start).to(tl.int32), num_stages=4):
            at = (start + i) * H + h
            decay += tl.load(log_alpha + at, mask=inside, other=0.0)
            tl.store(from_start + at, decay, mask=inside)


@triton.jit(do_not_specialize=["growth"])
def span_kernel(
    log_alpha, prior, table, inv_a, rescale, starts, counts, any_dense, H, growth, slots,
    BLOCK_H: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = h < H
    start, end = chunk_bounds(table, chunk)
    size = (end - start).to(tl.int32)
    # A small prior covers less of what rounding leaves of a state that is run backwards.
    growth *= tl.minimum(tl.load(prior + h, mask=inside, other=1.0), 1.0)
    # A state's size if all tokens were equal, divided by a_t: at least what the chunk before adds to it.
    weight = tl.zeros([BLOCK_H], tl.float32)
    _document, first = chunk_document(table, chunk)
    before, _end = chunk_bounds(table, tl.where(first == 0, chunk - 1, chunk))
    for i in tl.range(0, (start - before).to(tl.int32), num_stages=4):
        weight = 1.0 + weight * tl.exp(tl.load(log_alpha + (before + i) * H + h, mask=inside, other=0.0))
    at_anchor = weight
    since_anchor = tl.zeros([BLOCK_H], tl.float32)
    count = tl.zeros([BLOCK_H], tl.int32)
    for i in tl.range(0, size, num_stages=4):
        at = (start + i) * H + h
        decay = since_anchor + tl.load(log_alpha + at, mask=inside, other=0.0)
        grown = weight + tl.exp(-decay)
        new = (i == 0) | (grown > growth * at_anchor)
        tl.store(starts + (chunk * slots + count) * H + h, i, mask=inside & new & (count < slots))
        count += new.to(tl.int32)
        at_anchor = tl.where(new, 1.0 + weight * tl.exp(decay), at_anchor)
        weight = tl.where(new, at_anchor, grown)
        since_anchor = tl.where(new, 0.0, decay)
        tl.store(rescale + at, tl.where(new, tl.exp(decay), 2.0), mask=inside)
        tl.store(inv_a + at, tl.exp(-since_anchor), mask=inside)
    # 0 stands for a dense chunk.
    dense = count * GROUP > size
    tl.store(counts + chunk * H + h, tl.where(dense, 0, count), mask=inside)
    tl.atomic_max(any_dense, tl.max((dense & inside).to(tl.int32)))


@dataclass(frozen=True)
class Spans:
    """Attributes:
    inv_a: 1 / a_t [B, T, H].
    rescale: exp of the decay from the anchor before up to and with each anchor, 2 at other tokens [B, T, H].
    starts: first token of each span inside of its chunk [places, slots, H] int32.
    counts: the spans of each chunk, 0 where it is dense [places, H] int32.
    any_dense: 1 if a chunk of a head is, otherwise 0: int32, on the device.
    """

    inv_a: Tensor
    rescale: Tensor
    starts: Tensor
    counts: Tensor
    any_dense: Tensor

    @property
    def slots(self) -> int:
        """Most spans of a chunk that is not dense."""
        return self.starts.shape[1]


def chunk_decays(log_alpha: Tensor, chunks: Chunks, *, from_start: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Log-decay from each token to its chunk's end [B, T, H], and over each chunk [places, H].

    `from_start` [B, T, H] takes the log-decay from each chunk's start up to and with each token.
    """
    heads = log_alpha.shape[2]
    to_end = torch.empty_like(log_alpha)
    total = log_alpha.new_empty(chunks.places, heads)
    grid = (chunks.places, cdiv(heads, HEADS_PER_PROGRAM))
    chunk_decay_kernel[grid](
        log_alpha, chunks.table, to_end, to_end if from_start is None else from_start, total, heads,
        BLOCK_H=HEADS_PER_PROGRAM, FROM_START=from_start is not None, num_warps=1,
    )  # fmt: skip
    return to_end, total


def make_spans(log_alpha: Tensor, prior: Tensor, chunks: Chunks, growth: float) -> Spans:
    """Cut every chunk of every head into spans over which a state, divided by its decay, grows by `growth` at most,
    times the prior [H] where that is below 1."""
    heads = log_alpha.shape[2]
    inv_a, rescale = torch.empty_like(log_alpha), torch.empty_like(log_alpha)
    slots = cdiv(chunks.size, GROUP)
    starts = torch.empty(chunks.places, slots, heads, device=log_alpha.device, dtype=torch.int32)
    counts = torch.empty(chunks.places, heads, device=log_alpha.device, dtype=torch.int32)
    any_dense = torch.zeros(1, device=log_alpha.device, dtype=torch.int32)
    grid = (chunks.places, cdiv(heads, HEADS_PER_PROGRAM))
    span_kernel[grid](
        log_alpha, prior, chunks.table, inv_a, rescale, starts, counts, any_dense, heads, growth, slots,
        BLOCK_H=HEADS_PER_PROGRAM, GROUP=GROUP, num_warps=1,
    )  # fmt: skip
    return Spans(inv_a, rescale, starts, counts, any_dense)
