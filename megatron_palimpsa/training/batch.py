"""What one microbatch is, between the data and the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """One row of T = micro_batch_size * seq_length tokens that holds whole documents.

    A document never crosses the end of a packed sequence. `loss_mask` is 0 at each document's last token (its label
    belongs to the next document), on padding and on prompt tokens.
    """

    tokens: torch.Tensor
    """[1, T] int64."""
    labels: torch.Tensor
    """[1, T] int64, the token that follows."""
    loss_mask: torch.Tensor
    """[1, T] float32, 1 where the loss counts."""
    cu_seqlens: torch.Tensor
    """[N + 1] int32 document offsets: starts at 0, never falls, ends at or before T; tokens behind are padding."""
