"""The norm of all gradients, by which they are clipped."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer


@torch.no_grad()
def total_grad_norm(optimizer: ChainedOptimizer, device: torch.device) -> float:
    """L2 norm of the whole model's reduced gradients, the same on every rank. Collective.

    Summed in float64 and rounded to float32 at the end: the same gradients then have the same norm however an
    optimizer groups, orders, aligns or spreads them. Megatron's own sum is in float32, so that the last bits of the
    norm, and by clipping those of every weight, depend on which of its optimizers runs.
    """
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for part in optimizer.chained_optimizers:
        squares += _squares(part.get_grads_for_grad_norm(), part.get_grad_stats_parallel_group(), device)
    return float(squares.sqrt().float())


def _squares(gradients: list[torch.Tensor], group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    """Sum of squares over the group's ranks, each with gradients of its own or none."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    if gradients:
        # One kernel for all on CUDA, without float64 copies of the gradients.
        total = torch.stack(torch._foreach_norm(gradients, dtype=torch.float64)).square().sum()
    dist.all_reduce(total, group=group)
    return total
