"""Kernels of the Palimpsa layer and of Mamba2, its limit without importance."""

from palimpsa_kernels.api import (
    causal_conv1d,
    causal_conv1d_step,
    chunk_palimpsa,
    chunk_ssd,
    palimpsa_step,
    ssd_step,
)

__all__ = [
    "causal_conv1d",
    "causal_conv1d_step",
    "chunk_palimpsa",
    "chunk_ssd",
    "palimpsa_step",
    "ssd_step",
]
