"""One microbatch as the model takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Batch:
    """One row of T = micro_batch_size * seq_length tokens, documents one after the other, padding last.

    `loss_mask` is 1 where the label counts: not at a document's last token, on padding or on prompts.
    """

    tokens: torch.Tensor
    """[1, T] int64."""
    labels: torch.Tensor
    """[1, T] int64: the next token of the same document."""
    loss_mask: torch.Tensor
    """[1, T] float32."""
    cu_seqlens: torch.Tensor
    """[N + 1] int32: where the documents start, from 0, non-decreasing; behind the last entry there is padding."""

    def to(self, device: torch.device | str) -> Batch:
        return Batch(
            self.tokens.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            self.loss_mask.to(device, non_blocking=True),
            self.cu_seqlens.to(device, non_blocking=True),
        )
