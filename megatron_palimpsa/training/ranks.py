"""What the loop needs to know of the other processes; all but `is_main` are collective calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def is_main() -> bool:
    """Whether this is the process that writes to the run folder and to the screen."""
    return dist.get_rank() == 0


def largest(value: int) -> int:
    """The largest of all ranks' numbers, on every rank."""
    if dist.get_world_size() == 1:
        return value
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    tensor = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor)


def on_main[T](action: Callable[[], T]) -> T:
    """Run on the main process; its result, or its OSError, reaches every rank."""
    outcome: list[Any] = [None, None]
    if is_main():
        try:
            outcome[0] = action()
        except OSError as error:
            outcome[1] = error
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def to_main[T](value: T) -> list[T]:
    """Every rank's value in the order of ranks on the main process, an empty list on the others."""
    if dist.get_world_size() == 1:
        return [value]
    gathered: list[Any] | None = [None] * dist.get_world_size() if is_main() else None
    dist.gather_object(value, gathered, dst=0)
    return gathered or []


def to_all[T](value: T) -> list[T]:
    """Every rank's value in the order of ranks, on every rank."""
    if dist.get_world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
