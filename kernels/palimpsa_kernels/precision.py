"""Keeps the PyTorch scans' products in fp32 under autocast, which would round their operands to 16 bits."""

import functools
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor


def without_autocast[**P, T](method: Callable[P, T]) -> Callable[P, T]:
    """Forward or backward of an autograd function, its second argument a tensor, run with autocast off."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        device = cast(Tensor, args[1]).device.type
        if not torch.amp.is_autocast_available(device):
            return method(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return method(*args, **kwargs)

    return run
