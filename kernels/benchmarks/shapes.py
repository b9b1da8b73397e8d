"""Shapes of the released models' scans, and inputs for them with every class of decay."""

from dataclasses import dataclass

import torch
from torch import Tensor

CHECKED = 512  # first tokens, which are the same for every length
DECAYS = ("weak", "medium", "strong", "mixed")
PALIMPSA_INPUTS = ("q", "k", "v", "beta", "log_alpha", "prior")
SSD_INPUTS = ("q", "k", "v", "log_alpha")


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    groups: int
    key_dim: int
    value_dim: int


SHAPES = {
    "2.7B": Shape(1, 80, 1, 128, 64),
    "2.7B, 1 of 8 GPUs": Shape(1, 10, 1, 128, 64),
    "760M": Shape(4, 16, 16, 96, 192),
    "170M": Shape(8, 16, 16, 48, 96),
}


def decay_class(kind: str, head: int) -> str:
    """The class of a head's decays: in "classes" the heads take the four in turn."""
    return DECAYS[head % len(DECAYS)] if kind == "classes" else kind


def log_alphas(shape: Shape, tokens: int, kind: str, device: str) -> Tensor:
    """log_alpha [B, T, H]: all heads of one class, or ("classes") a quarter of the heads of each in turn."""
    size = (shape.batch, tokens, shape.heads)
    uniform = torch.rand(size, device=device)
    weak = -0.05 * uniform
    of_class = {
        "weak": weak,
        "medium": -uniform,
        "strong": -2 - 14 * uniform,
        "mixed": torch.where(torch.rand(size, device=device) < 0.02, -100 * uniform, weak),
    }
    heads = [of_class[decay_class(kind, h)][..., h] for h in range(shape.heads)]
    return torch.stack(heads, -1)


def _tokens(shape: Shape, tokens: int, kind: str, device: str) -> dict[str, Tensor]:
    b, h, g, k, v = shape.batch, shape.heads, shape.groups, shape.key_dim, shape.value_dim
    return {
        "q": torch.randn(b, tokens, g, k, device=device, dtype=torch.bfloat16),
        "k": torch.randn(b, tokens, g, k, device=device, dtype=torch.bfloat16),
        "v": torch.randn(b, tokens, h, v, device=device, dtype=torch.bfloat16),
        "beta": torch.rand(b, tokens, h, v, device=device, dtype=torch.bfloat16),
        "log_alpha": log_alphas(shape, tokens, kind, device),
    }


def make_inputs(shape: Shape, tokens: int, kind: str, device: str = "cuda") -> dict[str, Tensor]:
    """bf16 inputs of the scan as leaves, prior 1; log_alpha and prior in fp32, prior without a gradient."""
    torch.manual_seed(0)
    first = _tokens(shape, min(tokens, CHECKED), kind, device)
    rest = _tokens(shape, max(tokens - CHECKED, 0), kind, device)
    inputs = {name: torch.cat([x, rest[name]], 1).requires_grad_() for name, x in first.items()}
    return inputs | {"prior": torch.ones(shape.heads, device=device)}
