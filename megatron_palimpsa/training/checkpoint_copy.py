"""A copy of a rank's share in host memory, which a background thread writes while training goes on."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_palimpsa.engine.boxes import Box

_ALIGNMENT = 64


class HostCopy:
    """Host memory for one copy of a share, kept from one save to the next; page-locked where CUDA exists."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._unlock: weakref.finalize | None = None

    def take(self, values: Iterable[tuple[Box, Tensor]]) -> list[tuple[Box, Tensor]]:
        """Copy the values as they are now, over those of the copy before; returns when all are there.

        Raises:
            MemoryError: there is not so much host memory.
            RuntimeError: it cannot be locked.
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
            MemoryError, RuntimeError: as `take`.
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
        # Pages of its own: a page that is locked twice is an error. torch's own page-locked memory comes in powers of
        # two, up to twice as much.
        try:
            pages = mmap.mmap(-1, size)
        except OSError as error:
            raise MemoryError(f"no {size / 2**30:.3g} GiB of host memory for a copy: {error.strerror}") from error
        self._memory = torch.frombuffer(pages, dtype=torch.uint8)
        if torch.cuda.is_available():
            address = self._memory.data_ptr()
            _register(address, size)
            # Also where nobody releases it: freed memory that is still locked cannot be locked again.
            self._unlock = weakref.finalize(self, _unregister, address)

    def release(self) -> None:
        """Give the memory back; the copies are gone."""
        if self._unlock is not None:
            self._unlock()
            self._unlock = None
        self._memory = torch.empty(0, dtype=torch.uint8)


def _register(address: int, size: int) -> None:
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size, 0))
    except RuntimeError:
        # CUDA reports the error a second time, to whoever launches next.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        raise


def _unregister(address: int) -> None:
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))
