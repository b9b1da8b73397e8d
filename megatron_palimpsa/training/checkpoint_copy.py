"""A copy of a rank's share in host memory, which a background thread writes while training goes on."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_palimpsa.engine.boxes import Box

_ALIGNMENT = 64


class HostCopy:
    """Host memory for one copy of a share, kept from one save to the next; page-locked where CUDA exists."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._locked = False

    def take(self, values: Iterable[tuple[Box, Tensor]]) -> list[tuple[Box, Tensor]]:
        """Copy the values as they are now, over those of the copy before; returns when all are there.

        Raises:
            RuntimeError: not so much host memory can be had, or locked.
        """
        values = list(values)
        copies = []
        for start, (box, value) in zip(self.reserve(values), values, strict=True):
            memory = self._memory[start : start + value.numel() * value.element_size()]
            copy = memory.view(value.dtype).view(value.shape)
            copy.copy_(value, non_blocking=True)
            copies.append((box, copy))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copies

    def reserve(self, values: Iterable[tuple[Box, Tensor]]) -> list[int]:
        """Have the memory for a copy of such values, which takes seconds to lock; -> where in it each will be.

        Raises:
            RuntimeError: as `take`.
        """
        starts, size = [], 0
        for _, value in values:
            starts.append(size)
            size += -(-value.numel() * value.element_size() // _ALIGNMENT) * _ALIGNMENT
        if size > self._memory.numel():
            self.release()
            self._lock(size)
        return starts

    def _lock(self, size: int) -> None:
        self._memory = torch.empty(size, dtype=torch.uint8)
        if torch.cuda.is_available():
            # torch's own page-locked memory comes in powers of two: up to twice as much.
            runtime = torch.cuda.cudart()
            torch.cuda.check_error(runtime.cudaHostRegister(self._memory.data_ptr(), size, 0))
            self._locked = True

    def release(self) -> None:
        """Give the memory back; the copies are gone."""
        if self._locked:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr()))
            self._locked = False
        self._memory = torch.empty(0, dtype=torch.uint8)
