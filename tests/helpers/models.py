"""Models away from their initial weights, for tests."""

from __future__ import annotations

import torch


@torch.no_grad()
def randomise(model: torch.nn.Module, scale: float = 0.2, seed: int = 0) -> None:
    """Move every parameter away from its initial value, so that no term is 0 or 1 and none is negligible."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator).to(parameter))
