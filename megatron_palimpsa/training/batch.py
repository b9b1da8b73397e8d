"""One microbatch as the model takes it, and the part of it that a context-parallel rank takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RowPart:
    """How the documents of successive tokens of a row go on from and to its other parts.

    "Local" places count from the part's first token.
    """

    start: int
    """Place of the part's first token in the row."""
    first_start: int
    """Where in the row the part's first document starts: before `start` if earlier parts hold its beginning."""
    first_end: int
    """Local end of the first document's tokens."""
    open_from: int | None
    """Local start of the document whose tokens go on in the next part; None if the part ends with its last one."""
    crossed: bool
    """Some document of the row has tokens in several parts; the same for all of them."""

    @property
    def goes_on(self) -> bool:
        """The first document began in an earlier part."""
        return self.first_start < self.start

    @property
    def is_inside(self) -> bool:
        """All tokens belong to one document, which began before them and goes on behind them."""
        return self.goes_on and self.open_from == 0


@dataclass(frozen=True)
class Batch:
    """One row of T = micro_batch_size * seq_length tokens, documents one after the other, padding last.

    `loss_mask` is 1 where the label counts: not at a document's last token, on padding or on prompts. Under context
    parallelism `of_rank` gives a rank's part of the row, T / cp tokens.
    """

    tokens: torch.Tensor
    """[1, T] int64."""
    labels: torch.Tensor
    """[1, T] int64: the next token of the same document."""
    loss_mask: torch.Tensor
    """[1, T] float32."""
    cu_seqlens: torch.Tensor
    """[N + 1] int32: where the documents start, from 0, non-decreasing; behind the last entry there is padding."""
    part: RowPart | None = None
    """None for a whole row."""
    offsets: tuple[int, ...] | None = None
    """`cu_seqlens` on the host, once `to` was called."""

    def to(self, device: torch.device | str) -> Batch:
        return replace(
            self,
            offsets=self.offsets or tuple(self.cu_seqlens.tolist()),
            tokens=self.tokens.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            loss_mask=self.loss_mask.to(device, non_blocking=True),
            cu_seqlens=self.cu_seqlens.to(device, non_blocking=True),
        )

    def of_rank(self, rank: int, size: int) -> Batch:
        """Part `rank` of `size` equal parts of the whole row; the row itself where `size` is 1.

        Empty documents and those without tokens in the part are not among its `cu_seqlens`. Reads `cu_seqlens` on the
        host: cut before `to`.
        """
        if size == 1:
            return self
        length = self.tokens.shape[1] // size
        start, end = rank * length, (rank + 1) * length
        rows = list(pairwise(self.cu_seqlens.tolist()))
        documents = [(first, last) for first, last in rows if max(first, start) < min(last, end)]
        ends = [min(last, end) - start for _, last in documents] or [0]
        first_start, last_start, last_end = (
            (documents[0][0], documents[-1][0], documents[-1][1]) if documents else (start, start, start)
        )
        part = RowPart(
            start=start,
            first_start=min(first_start, start),
            first_end=ends[0],
            open_from=max(last_start - start, 0) if last_end > end else None,
            crossed=any(
                first < border < last for first, last in rows for border in range(length, size * length, length)
            ),
        )
        return Batch(
            tokens=self.tokens[:, start:end],
            labels=self.labels[:, start:end],
            loss_mask=self.loss_mask[:, start:end],
            cu_seqlens=self.cu_seqlens.new_tensor([0, *ends]),
            part=part,
        )
