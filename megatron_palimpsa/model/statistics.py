"""How long the layers remember and how unevenly, for the memory plots and for choosing layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from megatron_palimpsa.model.build import forward_loss
from megatron_palimpsa.model.mixer import Mixer
from megatron_palimpsa.model.naming import unwrap
from megatron_palimpsa.model.recorder import MemoryRecorder, Recorder
from megatron_palimpsa.training.batch import Batch


@contextlib.contextmanager
def record_memory(*chunks: nn.Module) -> Iterator[MemoryRecorder]:
    """Within it every forward pass of the mixers of this rank's model chunks is recorded."""
    with recording(MemoryRecorder(unwrap(chunks[0]).pg_collection.tp_cp), *chunks) as recorder:
        yield recorder


@contextlib.contextmanager
def recording[R: Recorder](recorder: R, *chunks: nn.Module) -> Iterator[R]:
    """The same with a recorder of one's own."""
    mixers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Mixer)]
    for mixer in mixers:
        mixer.recorder = recorder
    try:
        yield recorder
    finally:
        for mixer in mixers:
            mixer.recorder = None


@torch.no_grad()
def memory_statistics(model: nn.Module, batch: Batch) -> dict[int, dict[str, float]]:
    """Memory window and importance ratio of each layer with a mixer on one batch (see `MemoryRecorder.result`).

    The model has to hold all layers (no pipeline parallelism); under pipeline parallelism wrap a pipelined forward
    pass in `record_memory` instead.
    """
    with record_memory(model) as recorder:
        forward_loss(model, batch)
    return recorder.result()
