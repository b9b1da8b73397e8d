"""The host's part of launches, run several times a layer: plain integer arithmetic, and tables that layers share.

`triton.cdiv` and `triton.next_power_of_2` take 7 us a call, as long as a launch.
"""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor


def cdiv(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def next_power_of_2(x: int) -> int:
    """The smallest power of two that is at least x, for x >= 1."""
    return 1 << (x - 1).bit_length()


def tokens_adjacent(x: Tensor) -> Tensor:
    """x [B, T, ...] with a fixed stride from each token to the next over all rows, and dense tokens."""
    shape, strides = x.shape, x.stride()
    dense = 1
    for size, stride in zip(shape[:1:-1], strides[:1:-1], strict=True):
        if size != 1 and stride != dense and x.numel():
            return x.contiguous()
        dense *= size
    return x if shape[0] == 1 or strides[0] == shape[1] * strides[1] else x.contiguous()


def shared_by_layers[T](offsets: Tensor | None, key: tuple[Hashable, ...], make: Callable[[], T]) -> T:
    """What `make` makes of documents' offsets alone: once for one tensor and key, until the tensor is written to.

    It lives as long as the tensor and must not hold it. Another CUDA stream gets its own, whose order is that stream's,
    and so does a graph under capture, which replays with other offsets.
    """
    if offsets is None or offsets.is_inference():
        return make()
    if offsets.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return make()
        key = *key, torch.cuda.current_stream(offsets.device).cuda_stream
    made = offsets.__dict__.setdefault("_shared_by_layers", {})
    version, result = made.get(key, (None, None))
    if version != offsets._version:
        result = make()
        made[key] = offsets._version, result
    return result
