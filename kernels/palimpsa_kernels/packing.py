"""Documents cut into chunks, and the passing of states from chunk to chunk.

Rows of a batch and documents of a packed row are the same thing here: pieces of the flat list of B * T tokens.
"""

from itertools import pairwise

import torch
from torch import Tensor


def document_offsets(batch: int, tokens: int, cu_seqlens: Tensor | None) -> list[int]:
    """Offsets [N + 1] of the documents in the flat list of tokens; rows are the documents without cu_seqlens."""
    if cu_seqlens is None:
        return [row * tokens for row in range(batch + 1)]
    return cu_seqlens.tolist()


def spread_positions(offsets: list[int], new_starts: list[int], device: torch.device) -> Tensor:
    """Where each token goes when document d moves from offsets[d] to new_starts[d]: [offsets[-1]] int64."""
    lengths = torch.tensor([end - start for start, end in pairwise(offsets)], dtype=torch.int64)
    shifts = torch.tensor([new - old for new, old in zip(new_starts, offsets, strict=False)], dtype=torch.int64)
    return (torch.arange(offsets[-1]) + shifts.repeat_interleave(lengths)).to(device)


class Chunks:
    """Chunks of `size` tokens that start at document borders; a document's last chunk is filled up with zeros.

    Attributes:
        documents: the number N of documents.
        document: the document of each chunk, in order.
        first, last: whether a chunk is the first, the last of its document.
    """

    def __init__(self, batch: int, tokens: int, cu_seqlens: Tensor | None, size: int, device: torch.device) -> None:
        offsets = document_offsets(batch, tokens, cu_seqlens)
        counts = [-(-(end - start) // size) for start, end in pairwise(offsets)]
        self.size = size
        self.documents = len(counts)
        self.document = [d for d, count in enumerate(counts) for _ in range(count)]
        self.first = [i == 0 for count in counts for i in range(count)]
        self.last = [i == count - 1 for count in counts for i in range(count)]
        self._row_shape = (batch, tokens)
        self._used = offsets[-1]
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count * size)
        self._positions = None if starts == offsets else spread_positions(offsets, starts[:-1], device)

    def __len__(self) -> int:
        return len(self.document)

    def split(self, x: Tensor) -> Tensor:
        """[B, T, ...] to [chunks, size, ...] in at least fp32; zero where a chunk is not full."""
        flat = x.reshape(-1, *x.shape[2:])[: self._used].to(torch.promote_types(x.dtype, torch.float32))
        if self._positions is not None:
            flat = flat.new_zeros(len(self) * self.size, *x.shape[2:]).index_copy_(0, self._positions, flat)
        return flat.view(len(self), self.size, *x.shape[2:])

    def merge(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[chunks, size, ...] to [B, T, ...] in the given dtype; zero behind the last document."""
        flat = x.reshape(-1, *x.shape[2:])
        if self._positions is not None:
            flat = flat.index_select(0, self._positions)
        batch, tokens = self._row_shape
        if self._used < batch * tokens:
            flat = torch.cat([flat, flat.new_zeros(batch * tokens - self._used, *flat.shape[1:])])
        return flat.view(batch, tokens, *flat.shape[1:]).to(dtype)

    def pass_states(
        self,
        added: Tensor,
        decay: Tensor,
        initial: Tensor,
        final: Tensor | None,
        part: range | None = None,
        state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run state = decay[i] * state + added[i] over the chunks of each document.

        Args:
            added: what each chunk adds to the state [m, ...].
            decay: of each chunk, broadcastable to `added`.
            initial: state before each document's first chunk [N, ...].
            final: the states behind documents that end here are written to it [N, ...], unless it is None.
            part: which m chunks, all of them if not given.
            state: the state before the first of them [...]; not read if a document starts there.

        Returns:
            The state before each chunk [m, ...], and the one behind the last [...].
        """
        return self._pass(added, decay, initial, final, part, state, step=1)

    def pass_adjoints(
        self,
        added: Tensor,
        decay: Tensor,
        dfinal: Tensor,
        dinitial: Tensor,
        part: range | None = None,
        adjoint: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The adjoint of `pass_states`, from the last chunk to the first: the adjoint behind each chunk."""
        return self._pass(added, decay, dfinal, dinitial, part, adjoint, step=-1)

    def _pass(
        self,
        added: Tensor,
        decay: Tensor,
        start: Tensor,
        end: Tensor | None,
        part: range | None,
        state: Tensor | None,
        step: int,
    ) -> tuple[Tensor, Tensor]:
        part = range(len(self)) if part is None else part
        enters, leaves = (self.first, self.last) if step == 1 else (self.last, self.first)
        state = start.new_zeros(start.shape[1:]) if state is None else state
        incoming = torch.empty_like(added)
        rows = list(zip(part, incoming.unbind(), added.unbind(), decay.unbind(), strict=True))
        for i, incoming_i, added_i, decay_i in rows[::step]:
            if enters[i]:
                state = start[self.document[i]]
            incoming_i.copy_(state)
            state = torch.addcmul(added_i, decay_i, state)
            if leaves[i] and end is not None:
                end[self.document[i]] = state
        return incoming, state
