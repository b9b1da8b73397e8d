"""Triton kernels behind the public functions of `palimpsa_kernels`, for CUDA devices."""

from palimpsa_kernels.triton.conv import causal_conv1d
from palimpsa_kernels.triton.mixing import mixing_scan
from palimpsa_kernels.triton.norm import gated_rms_norm
from palimpsa_kernels.triton.palimpsa import chunk_palimpsa
from palimpsa_kernels.triton.ssd import chunk_ssd
from palimpsa_kernels.triton.step import palimpsa_step, ssd_step

__all__ = ["causal_conv1d", "chunk_palimpsa", "chunk_ssd", "gated_rms_norm", "mixing_scan", "palimpsa_step", "ssd_step"]
