"""Kernels of the Palimpsa layer and of Mamba2, its limit without importance."""

from palimpsa_kernels.api import (
    causal_conv1d,
    causal_conv1d_step,
    chunk_palimpsa,
    chunk_ssd,
    palimpsa_step,
    ssd_step,
)
from palimpsa_kernels.carry import Carry
from palimpsa_kernels.mixing import HeadParameters, Importance, mixing_scan
from palimpsa_kernels.norm import gated_rms_norm

__all__ = [
    "Carry",
    "HeadParameters",
    "Importance",
    "causal_conv1d",
    "causal_conv1d_step",
    "chunk_palimpsa",
    "chunk_ssd",
    "gated_rms_norm",
    "mixing_scan",
    "palimpsa_step",
    "ssd_step",
]
