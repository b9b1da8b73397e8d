"""What the loop needs to know of the other processes."""

from __future__ import annotations

import torch
import torch.distributed as dist


def is_main() -> bool:
    """Whether this is the process that writes to the run folder and to the screen."""
    return dist.get_rank() == 0


def largest(value: int) -> int:
    """The largest of all ranks' numbers, on every rank; a collective call."""
    if dist.get_world_size() == 1:
        return value
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    tensor = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor)
