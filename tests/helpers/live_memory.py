"""What training holds in memory on a GPU, counted without one.

The engine runs on the CPU with the choices of CUDA: our Triton kernels' Python around launches that do nothing, Adam
over all parameters at once. Their tensors are those of a GPU, their values are not.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from palimpsa_kernels import dispatch, norm
from palimpsa_kernels.triton import elementwise
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

PROCESSORS = 132


class LiveMemory(TorchDispatchMode):
    """Bytes of all tensors made within it: `live` now, `peak` at most, in blocks of the CUDA allocator's size."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known or storage.device.type == "meta":
            return
        size = -(-storage.nbytes() // 512) * 512
        self._known.add(storage)
        weakref.finalize(storage, self._remove, size)
        self.live += size
        self.peak = max(self.peak, self.live)

    def _remove(self, size: int) -> None:
        self.live -= size

    def start_peak(self) -> None:
        self.peak = self.live


def _processors(device: torch.device) -> int:
    return PROCESSORS


def _launch_nothing(*args: Any, **kwargs: Any) -> None:
    pass


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """CPU tensors take the way of CUDA's through `palimpsa_kernels`; nothing is computed there."""

    def own_triton(name: str, device_type: str) -> Any:
        return getattr(dispatch.triton_module(), name, None)

    dispatch.implementation.cache_clear()
    with (
        mock.patch.object(dispatch, "own_triton", own_triton),
        mock.patch.object(norm, "own_triton", own_triton),
        mock.patch.object(elementwise, "processors", _processors),
        # No Mock, which would keep the launches' tensors.
        mock.patch.object(InterpretedFunction, "run", _launch_nothing),
    ):
        yield
    dispatch.implementation.cache_clear()
