"""Logits and losses of some tokens at a time: of a long sequence they are the largest tensors there are."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

TOKENS = 4096
"""Whose logits exist at a time."""


class _TokenLosses(torch.autograd.Function):
    """Negative log-likelihood of labels [T, 1] from hidden [T, 1, h] and weight [V / tp, h]; fp32 [T, 1].

    Logits are formed again for the backward pass, a product more, and the weight's gradient is summed in fp32.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, tp_group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(hidden, weight, labels)
        ctx.tp_group = tp_group
        return torch.cat(
            [
                vocab_parallel_cross_entropy(torch.matmul(states, weight.t()), targets, tp_group=tp_group)
                for states, targets in zip(hidden.split(TOKENS), labels.split(TOKENS), strict=True)
            ]
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        parts = [tensor.split(TOKENS) for tensor in (hidden, labels, grads[0])]
        d_hidden, d_weight = torch.empty_like(hidden), None
        for states, targets, d_losses, d_states in zip(*parts, d_hidden.split(TOKENS), strict=True):
            logits = torch.matmul(states, weight.t()).requires_grad_()
            with torch.enable_grad():
                losses = vocab_parallel_cross_entropy(logits, targets, tp_group=ctx.tp_group)
            (d_logits,) = torch.autograd.grad(losses, logits, d_losses)
            del logits, losses
            torch.matmul(d_logits, weight, out=d_states)
            part = d_logits.flatten(0, 1).t().matmul(states.flatten(0, 1))
            del d_logits
            if len(hidden) <= TOKENS:
                d_weight = part
            elif d_weight is None:
                d_weight = part.float()
            else:
                d_weight += part
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None


class ChunkedLossModel(HybridModel):
    """A HybridModel that, given labels, never holds the logits of more than `TOKENS` tokens."""

    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Tensor:
        """As HybridModel's: losses [1, T] on the last pipeline stage, given labels."""
        if labels is None or not self.post_process:
            return super().forward(*args, labels=labels, **kwargs)
        # The output layer is called as always, for the hooks on its weight, and passes the hidden states on.
        self.output_layer.forward = lambda hidden, **options: (hidden, None)
        try:
            return super().forward(*args, labels=labels, **kwargs)
        finally:
            del self.output_layer.forward

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Losses [1, T] of labels [1, T]; `logits` are the hidden states behind the final norm [T or T / tp, 1, h]."""
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(logits, group=self.tp_group)
        else:
            hidden = copy_to_tensor_model_parallel_region(logits, group=self.tp_group)
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        losses = _TokenLosses.apply(hidden, weight, labels.transpose(0, 1).contiguous(), self.tp_group)
        return losses.transpose(0, 1).contiguous()
