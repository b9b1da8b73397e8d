"""Tiles and warps that depend on the device: the one place that asks for its compute capability.

Chosen so that no loop spills registers, see `kernels/benchmarks/compiled.py`. What differs is where matrix products
have their operands and sums: all in registers on Ampere (8.x), operands in shared memory on Hopper (9.0), and sums in a
memory of their own on Blackwell (10.0).
"""

import functools
from typing import Any

import torch

from palimpsa_kernels.triton.launches import next_power_of_2

HOPPER, BLACKWELL = 90, 100


@functools.cache
def capability(device: torch.device) -> int:
    """Compute capability as 10 * major + minor; without a CUDA device, for the interpreter, Hopper's."""
    if device.type != "cuda":
        return HOPPER
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def ssd_block_v(block_k: int, value_dim: int, dtype: torch.dtype) -> int:
    """Value channels at a time of SSD's kernels; a chunk's wide q and k in fp32 fill the shared memory."""
    widest = 16 if block_k > 128 and dtype != torch.bfloat16 else 64
    return max(16, min(widest, next_power_of_2(value_dim)))


def ssd_gradient_options(target: int, block_v: int) -> dict[str, Any]:
    """Block of value channels, warps, and whether the matrix that sums pairs of tokens is loaded instead of formed."""
    hopper = HOPPER <= target < BLACKWELL
    return {
        "BLOCK_V": block_v if target >= HOPPER else min(block_v, 32),
        "TRIANGLE": hopper,
        "num_warps": 4 if hopper else 8,
    }


def incoming_blocks(target: int, block_k: int, value_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Tokens and value channels at a time of the incoming adjoints; wide keys in fp32 fill the shared memory."""
    wide = block_k > 128
    widest = 16 if target < HOPPER else 32 if wide else 64
    return {
        "BLOCK_T": 32 if target < HOPPER or (block_k > 64 and dtype != torch.bfloat16) else 64,
        "BLOCK_V": max(16, min(widest, next_power_of_2(value_dim))),
    }


def incoming_stages(target: int, dtype: torch.dtype, *, one_block: bool) -> int:
    """2 prefetches the next head, which takes the shared memory of a Hopper; `one_block`: of all value channels."""
    return 2 if one_block and dtype == torch.bfloat16 and target >= HOPPER else 1


def adjoint_tiles(target: int) -> tuple[tuple[int, int], ...]:
    """Tiles (BLOCK_K, BLOCK_V) of the elementwise adjoints, whose sums tensor cores can form, the best first.

    32 elements of each of four states in a thread leave too few registers but on Hopper.
    """
    small = (32, 16), (16, 32), (16, 16)
    return ((64, 16), (32, 32), *small) if HOPPER <= target < BLACKWELL else small
