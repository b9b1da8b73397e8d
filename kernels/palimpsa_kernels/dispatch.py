"""Chooses the implementation of a kernel: Triton on CUDA where it is installed and built, PyTorch otherwise."""

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from palimpsa_kernels import chunked, conv, ssd, steps

logger = logging.getLogger("palimpsa_kernels")

TRITON_MODULE = "palimpsa_kernels.triton"
PYTORCH: dict[str, Callable[..., Any]] = {
    "chunk_palimpsa": chunked.chunk_palimpsa,
    "palimpsa_step": steps.palimpsa_step,
    "chunk_ssd": ssd.chunk_ssd,
    "ssd_step": steps.ssd_step,
    "causal_conv1d": conv.causal_conv1d,
    "causal_conv1d_step": conv.causal_conv1d_step,
}


@functools.cache
def triton_module() -> ModuleType | None:
    """The package of Triton kernels, or None where Triton or the package is missing."""
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec(TRITON_MODULE) is None:
        return None
    return importlib.import_module(TRITON_MODULE)


@functools.cache
def implementation(name: str, device_type: str) -> Callable[..., Any]:
    """The function behind the public `name` on devices of this type; says once, at INFO, which one it is."""
    module = triton_module() if device_type == "cuda" else None
    function = getattr(module, name, None)
    backend = "PyTorch" if function is None else "Triton"
    logger.info("%s on %s runs in %s", name, torch.device(device_type), backend)
    return function or PYTORCH[name]
