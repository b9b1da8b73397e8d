"""How long each layer and head remembers: the memory window N_t = 1 / (1 - alpha_t), in tokens (arXiv 2602.09075)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor

from megatron_palimpsa.model import recording, run_layers
from megatron_palimpsa.model.mixer import Mixer
from megatron_palimpsa.model.recorder import windows_of_tokens
from megatron_palimpsa.training.batch import Batch
from megatron_palimpsa.training.validation import document_positions

_MOST_BUCKETS = 64


@dataclass(frozen=True)
class Quartiles:
    """Of windows, in tokens; each is one of them, the smallest that a quarter (half, three quarters) do not exceed."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, windows: np.ndarray) -> Quartiles:
        return cls(*map(float, np.quantile(windows, (0.25, 0.5, 0.75), method="inverted_cdf")))


@dataclass(frozen=True)
class LayerWindows:
    """What a layer's heads did with the tokens of a text."""

    number: int
    """From 1, over all layers of the pattern."""
    symbol: str
    whole: Quartiles
    """Over heads and tokens."""
    heads: list[Quartiles]
    """Over tokens."""
    by_position: list[float]
    """Medians over heads and the tokens of each bucket of `position_edges`; nan where no document is so long."""


def measure(
    model: HybridModel,
    layers: str,
    batches: Sequence[Batch],
    seq_length: int,
    progress: Callable[[int, float], None] = lambda rows, seconds_left: None,
) -> list[LayerWindows]:
    """Windows of all recurrent layers over rows of `seq_length` tokens.

    What is kept for each layer, head and token is one float32 in host memory, so that quantiles are exact.

    Args:
        model: whole, on one process, in evaluation mode.
        layers: its pattern without borders.
        progress: is told after each layer how many rows are through, and for how many seconds it will go on.
    """
    mixers = sum(isinstance(module, Mixer) for module in model.modules())
    recorder = _WindowRecorder(_left(len(batches), mixers, progress))
    device = next(model.parameters()).device
    with torch.no_grad(), recording(recorder, model):
        for batch in batches:
            run_layers(model, batch.to(device))
    positions = np.concatenate([document_positions(batch)[: int(batch.cu_seqlens[-1])].numpy() for batch in batches])
    edges = position_edges(seq_length)
    buckets = np.searchsorted(edges, positions, side="right") - 1
    return [
        _summary(number, layers[number - 1], values, buckets, len(edges) - 1)
        for number, values in sorted(recorder.windows())
    ]


def position_edges(seq_length: int) -> np.ndarray:
    """Borders of buckets of positions in a document, about equally wide, at most 64 of them."""
    return np.linspace(0, seq_length, min(_MOST_BUCKETS, seq_length) + 1).round().astype(np.int64)


def _summary(number: int, symbol: str, windows: np.ndarray, buckets: np.ndarray, count: int) -> LayerWindows:
    """Of windows [tokens, heads] and each token's bucket [tokens]."""
    order = np.argsort(buckets, kind="stable")
    borders = np.searchsorted(buckets[order], np.arange(1, count))
    groups = np.split(windows[order], borders)
    by_position = [Quartiles.of(group.ravel()).median if len(group) else float("nan") for group in groups]
    heads = [Quartiles.of(head) for head in windows.T]
    return LayerWindows(number, symbol, Quartiles.of(windows.ravel()), heads, by_position)


class _WindowRecorder:
    """Keeps the windows of all layers, [tokens, heads] each."""

    def __init__(self, after_layer: Callable[[], None]) -> None:
        self._after_layer = after_layer
        self._kept: dict[int, list[np.ndarray]] = {}

    def record(
        self,
        layer_number: int,
        log_alpha: Tensor,
        importance: tuple[Tensor, Tensor] | None,
        cu_seqlens: Tensor | None,
    ) -> None:
        self._kept.setdefault(layer_number, []).append(windows_of_tokens(log_alpha, cu_seqlens).cpu().numpy())
        self._after_layer()

    def windows(self) -> Iterable[tuple[int, np.ndarray]]:
        for number, parts in self._kept.items():
            yield number, np.concatenate(parts)


def _left(rows: int, mixers: int, progress: Callable[[int, float], None]) -> Callable[[], None]:
    """To be called after each recurrent layer of each row."""
    start, done = time.monotonic(), 0

    def after_layer() -> None:
        nonlocal done
        done += 1
        progress(done // mixers, (time.monotonic() - start) / done * (rows * mixers - done))

    return after_layer
