"""An engine's float32 weights and moments as tensors of the unsplit model."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_palimpsa.engine.base import Engine


def state_of(engine: Engine) -> dict[str, Tensor]:
    """Weights and moments by their keys in a checkpoint, with zeros for what other ranks have in their share."""
    state: dict[str, Tensor] = {}
    for box, value in engine.state_share():
        whole = state.setdefault(box.key, torch.zeros(box.whole))
        whole[tuple(slice(first, first + size) for first, size in zip(box.offset, box.shape, strict=True))] = value
    return state


def weights_of(engine: Engine) -> dict[str, Tensor]:
    return {key: value for key, value in state_of(engine).items() if not key.startswith("optimizer.")}


def moments_of(engine: Engine) -> dict[str, Tensor]:
    return {key: value for key, value in state_of(engine).items() if key.startswith("optimizer.")}
