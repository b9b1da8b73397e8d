"""What the mixers hand over while their memory is looked at."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

SMALLEST_FORGETTING = 1e-12
"""1 - alpha below this counts as this, so that a head that forgets nothing has a finite window."""


def window(log_alpha: Tensor) -> Tensor:
    """N_t = 1 / (1 - alpha_t) in tokens, of log_alpha_t; as precise as that where alpha_t is next to 1."""
    return 1 / (-torch.expm1(log_alpha)).clamp(min=SMALLEST_FORGETTING)


def windows_of_tokens(log_alpha: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """`window` of log_alpha [B, T, H] -> [tokens, H], without the padding behind the last of the offsets [N + 1]."""
    tokens = log_alpha.flatten(0, 1)
    return window(tokens if cu_seqlens is None else tokens[: int(cu_seqlens[-1])])


class Recorder(Protocol):
    """What a mixer can be given."""

    def record(
        self,
        layer_number: int,
        log_alpha: Tensor,
        importance: tuple[Tensor, Tensor] | None,
        cu_seqlens: Tensor | None,
    ) -> None:
        """Called by the mixers, see `MemoryRecorder`."""


class MemoryRecorder:
    """Collects, over any number of forward passes, what `result` summarises."""

    def __init__(self, tp_cp_group: dist.ProcessGroup) -> None:
        self._group = tp_cp_group
        self._windows: dict[int, list[Tensor]] = {}
        self._ratios: dict[int, list[Tensor]] = {}

    @torch.no_grad()
    def record(
        self,
        layer_number: int,
        log_alpha: Tensor,
        importance: tuple[Tensor, Tensor] | None,
        cu_seqlens: Tensor | None,
    ) -> None:
        """Called by the mixers.

        Args:
            layer_number: 1-based, over all pipeline stages.
            log_alpha: [B, T, H] of this rank's heads.
            importance: prior [H] and final Ibar [N, H, V, K]; None for Mamba2. Ibar may lack the last document, which
                ends on another rank under context parallelism.
            cu_seqlens: document offsets [N + 1]; None where each row is one document.
        """
        self._windows.setdefault(layer_number, []).append(windows_of_tokens(log_alpha, cu_seqlens).flatten())
        if importance is None:
            return
        prior, above_prior = importance
        if cu_seqlens is not None:
            above_prior = above_prior[cu_seqlens.diff()[: len(above_prior)] > 0]
        lowest = prior + above_prior.amin(dim=(-2, -1))
        highest = prior + above_prior.amax(dim=(-2, -1))
        self._ratios.setdefault(layer_number, []).append(((highest - lowest) / lowest).flatten())

    def result(self) -> dict[int, dict[str, float]]:
        """Medians of this pipeline stage's layers over all tensor- and context-parallel ranks (call it on all of them).

        Returns:
            1-based layer number -> `window`: median over heads and tokens of N_t = 1 / (1 - alpha_t), in tokens, and
            for layers with importance `importance_ratio`: median over heads and documents of (I_max - I_min) / I_min
            over the state's entries at the documents' ends.
        """
        result = {layer: {"window": self._median(values)} for layer, values in sorted(self._windows.items())}
        for layer, values in sorted(self._ratios.items()):
            result[layer]["importance_ratio"] = self._median(values)
        return result

    def _median(self, values: list[Tensor]) -> float:
        mine = torch.cat(values)
        size = torch.tensor(len(mine), device=mine.device)
        sizes = [torch.empty_like(size) for _ in range(self._group.size())]
        dist.all_gather(sizes, size, group=self._group)
        # Context-parallel ranks may differ in padding and in the documents that end there.
        longest = max(map(int, sizes))
        parts = [mine.new_empty(longest) for _ in sizes]
        dist.all_gather(parts, F.pad(mine, (0, longest - len(mine))), group=self._group)
        return float(torch.cat([part[:count] for part, count in zip(parts, sizes, strict=True)]).median())
