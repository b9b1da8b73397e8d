"""The table of chunks, made on the device: no length of a document ever travels to the host.

A chunk is a run of at most `size` tokens of one document in the flat list of B * T tokens; rows without cu_seqlens are
documents too. The number of places is an upper bound that follows from shapes alone; places that are not needed hold
no tokens.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from palimpsa_kernels.triton.launches import cdiv, next_power_of_2, shared_by_layers

TABLE_COLUMNS = 4


@triton.jit(do_not_specialize=["documents", "size"])
def chunk_table_kernel(offsets, table, first_chunks, documents, size, BLOCK: tl.constexpr):
    chunk = tl.program_id(0)
    before = 0
    start = tl.zeros([], tl.int64)
    end = tl.zeros([], tl.int64)
    document = tl.full([], -1, tl.int64)
    first = tl.zeros([], tl.int64)
    for base in range(0, documents, BLOCK):
        n = base + tl.arange(0, BLOCK)
        inside = n < documents
        left = tl.load(offsets + n, mask=inside, other=0).to(tl.int64)
        right = tl.load(offsets + n + 1, mask=inside, other=0).to(tl.int64)
        count = ((right - left + size - 1) // size).to(tl.int32)
        behind = before + tl.cumsum(count, 0)
        ahead = behind - count
        mine = (ahead <= chunk) & (chunk < behind)
        chunk_start = left + (chunk - ahead).to(tl.int64) * size
        chunk_end = tl.minimum(chunk_start + size, right)
        start += tl.sum(tl.where(mine, chunk_start, 0))
        end += tl.sum(tl.where(mine, chunk_end, 0))
        document += tl.sum(tl.where(mine, n + 1, 0))
        first += tl.sum(tl.where(mine & (chunk_start == left), 1, 0))
        if chunk == 0:
            tl.store(first_chunks + n, ahead, mask=inside)
            tl.store(first_chunks + n + 1, behind, mask=n == documents - 1)
        before += tl.sum(count)
    row = table + chunk.to(tl.int64) * 4
    tl.store(row, start)
    tl.store(row + 1, end)
    tl.store(row + 2, document)
    tl.store(row + 3, first)


@dataclass(frozen=True)
class Chunks:
    """Attributes:
    table: first token, end, document (-1: unused), whether first of its document [places, 4] int64.
    first_chunks: the chunks of document n are first_chunks[n] .. first_chunks[n + 1] [documents + 1] int32.
    places: upper bound of the number of chunks.
    cover_all: every token is in some chunk.
    """

    table: Tensor
    first_chunks: Tensor
    places: int
    documents: int
    size: int
    cover_all: bool

    @property
    def first_document(self) -> "Chunks":
        """The same places, with the chunks of the first document alone."""
        return replace(self, first_chunks=self.first_chunks[:2], documents=1)

    @property
    def last_document(self) -> "Chunks":
        return replace(self, first_chunks=self.first_chunks[-2:], documents=1)


def make_chunks(
    batch: int, tokens: int, cu_seqlens: Tensor | None, size: int, device: torch.device, *, goes_on: bool = False
) -> Chunks:
    """Cut B rows of T tokens, or the documents between the offsets of one row, into chunks of at most `size` tokens.

    `goes_on`: the first document, which has tokens, goes on from another part of the row. Its first chunk is then not
    marked as one, so that it starts from what is kept in front of the first place.
    """

    def make() -> Chunks:
        if cu_seqlens is None:
            offsets = torch.arange(batch + 1, device=device, dtype=torch.int64) * tokens
            places = batch * cdiv(tokens, size)
        else:
            offsets = cu_seqlens
            places = tokens // size + cu_seqlens.shape[0] - 1
        documents = offsets.shape[0] - 1
        # One more row in front, without tokens.
        table = torch.zeros(1 + places, TABLE_COLUMNS, device=device, dtype=torch.int64)[1:]
        first_chunks = torch.zeros(documents + 1, device=device, dtype=torch.int32)
        if places:
            block = min(1024, next_power_of_2(max(documents, 16)))
            chunk_table_kernel[(places,)](offsets, table, first_chunks, documents, size, BLOCK=block, num_warps=1)
            if goes_on:
                table[0, 3] = 0
        return Chunks(table, first_chunks, places, documents, size, cu_seqlens is None)

    return shared_by_layers(cu_seqlens, ("chunks", tokens, size, goes_on), make)
