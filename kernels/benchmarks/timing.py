"""Times on the current CUDA device, and numbers on the command line."""

import argparse
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

L2_BYTES = 256 << 20


def times_ms(functions: Sequence[Callable[[], object]], *, budget_ms: float, least: int) -> list[list[float]]:
    """Milliseconds of each run of each function, taken in turn: as many as the budget holds, `least` to 50.

    Two runs of each before warm up and tell how long they take. The L2 cache is overwritten before each run, and
    nothing waits between runs, so that the host's work hides behind the device's where it can.
    """
    flush = torch.empty(L2_BYTES, dtype=torch.int8, device="cuda")

    def measured(function: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        function()
        end.record()
        return start, end

    def elapsed(runs: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> list[float]:
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in runs]

    for function in functions:
        function()
    round_ms = sum(elapsed([measured(function) for function in functions]))
    rounds = max(least, min(50, int(budget_ms / round_ms)))
    taken = [[measured(function) for function in functions] for _ in range(rounds)]
    return [elapsed(list(runs)) for runs in zip(*taken, strict=True)]


def median_ms(function: Callable[[], object], *, budget_ms: float = 250.0, least: int = 3) -> float:
    return statistics.median(times_ms([function], budget_ms=budget_ms, least=least)[0])


def peak_gib(function: Callable[[], object]) -> float:
    """GiB allocated at the peak beyond what was allocated before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def positive(text: str) -> int:
    """A number of tokens, documents, rounds or batches on the command line."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def clear_gradients(leaves: Sequence[Tensor]) -> None:
    for x in leaves:
        x.grad = None
