"""What a training step on a GPU spends its time on, by the names of its kernels."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable

import torch

PARTS = {
    "communication": r"nccl",
    "optimizer": r"adam|multi_tensor|lpnorm",
    "matmul": r"gemm|cutlass|nvjet|cublas|xmma|_mm_|splitK",
    "attention": r"flash|fmha|attention|sdpa",
    "norm": r"norm",
    "conv": r"conv|place_kernel|final_kernel|border_gradient",
    "scan": r"chunk|ssd|readout|adjoint|incoming|state|span|decay|sum_parts|pack_kernel|activat|skip|_bmm",
}
"""Of a step, by regular expressions that its kernels' names have; the first that is found counts, "other" else."""


def part_of(kernel: str) -> str:
    """The part of `PARTS` that a kernel belongs to, "other" where none does."""
    return next((part for part, pattern in PARTS.items() if re.search(pattern, kernel, re.IGNORECASE)), "other")


def kernels_of(step: Callable[[], object]) -> tuple[list[tuple[str, float, float]], float]:
    """Run the step; -> (name, start, end) of every kernel on this process's GPU, and the whole time, in seconds."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as record:
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    events = [event for event in record.events() or () if event.device_type == torch.autograd.DeviceType.CUDA]
    return [(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6) for event in events], seconds


def shares(kernels: Iterable[tuple[str, float, float]], seconds: float) -> dict[str, float]:
    """Each part's kernels over the step's whole time, and "idle": the time in which no kernel ran.

    Kernels on several streams, communication above all, run at the same time: together they may come to more than 1.

    Args:
        kernels: (name, start, end) each, in seconds.
        seconds: of the whole step.
    """
    found = dict.fromkeys((*PARTS, "other", "idle"), 0.0)
    busy = reached = 0.0
    for name, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        found[part_of(name)] += (end - start) / seconds
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return found | {"idle": max(0.0, 1 - busy / seconds)}
