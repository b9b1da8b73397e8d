"""Bounds of the pre-flight check."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

_Size = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
_Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Preflight:
    """What a node must have; one that has not is excluded from the job, which is requeued."""

    gpu_memory_free: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Share of each GPU's memory: less, and another program is still on it."""
    allreduce_gb_s: _Size = 0.0
    """Least bus bandwidth of an all-reduce over all ranks: 2 (n - 1) / n * bytes / seconds, as NCCL's tests have it.
    0: it is measured and noted, and only a failure or a wrong sum counts."""
    allreduce_mb: Annotated[float, Field(gt=0, le=65_536)] | None = None
    """Megabytes that are added up; None: 256 on GPUs, 4 without."""
    run_folder_gb: _Size = 1.0
    """Free disk under the stage's folder; whether checkpoints fit is looked at when training starts."""
    local_folder_gb: _Size = 1.0
    """Free disk for kernel caches on the node itself."""
    clock_seconds: _Seconds = 5.0
    """A clock may be so far from the others'."""
    seconds: _Seconds = 180.0
    """Patience with a node that does not answer, and with an all-reduce that does not end."""
    max_excluded: Annotated[int, Field(ge=0, le=1000)] = 4
    """Nodes that a job may leave out over all its attempts."""
