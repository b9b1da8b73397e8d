"""Megatron-Core on a machine without CUDA.

Megatron-Core asks CUDA for the current device, for random states and for scratch tensors whatever the backend is.
`install()` answers those questions with the CPU's counterparts, once a process; `cuda_means_cpu()` is entered around
the calls that spell the device out (`device="cuda"`) or compare `Tensor.type()`. Neither is used where CUDA exists.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_installed = False


class _IdleStream:
    """Stands for a CUDA stream: CPU work is already ordered."""

    def wait_stream(self, stream: _IdleStream) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


class CpuRngStatesTracker(megatron_random.CudaRNGStatesTracker):
    """Named random states of the default CPU generator, with the interface of Megatron's tracker."""

    def add(self, name: str, seed: int) -> None:
        if seed in self.seeds_:
            raise ValueError(f"random seed {seed} is in use already")
        if name in self.states_:
            raise ValueError(f"random state {name!r} exists already")
        self._is_initialized = True
        self.seeds_.add(seed)
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str = megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        outer = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outer)


def _initialize_rng_tracker(*args: Any, force_reset: bool = False, **kwargs: Any) -> None:
    if force_reset or not megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED:
        megatron_random._CUDA_RNG_STATE_TRACKER = CpuRngStatesTracker()
        megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(new_state)


def install() -> None:
    """Answer Megatron's CUDA calls from the CPU in this process; a second call changes nothing.

    Raises:
        RuntimeError: this machine has CUDA, where nothing may be replaced.
    """
    global _installed
    if torch.cuda.is_available():
        raise RuntimeError("the CPU stand-ins must not be installed on a machine with CUDA")
    if _installed:
        return
    stream = _IdleStream()
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_stream = lambda device=None: stream  # type: ignore[assignment, return-value]
    megatron_random.initialize_rng_tracker = _initialize_rng_tracker
    megatron_random._get_cuda_rng_state = _get_rng_state
    megatron_random._set_cuda_rng_state = _set_rng_state
    _installed = True


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.cuda:
            return args[0]
        if kwargs.get("device") == "cuda":
            kwargs = {**kwargs, "device": _CPU}
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and len(args) == 1 and not kwargs and _asked_by_megatron_optimizer():
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _asked_by_megatron_optimizer() -> bool:
    # Frame 0 is this function, 1 is __torch_function__, 2 is whoever called Tensor.type.
    return sys._getframe(2).f_globals.get("__name__", "").startswith("megatron.core.optimizer")


def cuda_means_cpu() -> contextlib.AbstractContextManager[object]:
    """Within it `device="cuda"` and `Tensor.cuda` give CPU tensors, and Megatron's optimizers take those for CUDA ones.

    Does nothing where CUDA exists.
    """
    return contextlib.nullcontext() if torch.cuda.is_available() else _CudaMeansCpu()
