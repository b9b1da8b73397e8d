"""Other packages' SSD with our arguments, timed beside ours where they are importable."""

from collections.abc import Callable
from typing import Any

import torch
from palimpsa_kernels import ssd as pytorch_ssd
from palimpsa_kernels.peers import load_mamba_ssm
from torch import Tensor


def mamba_ssm_scan() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """mamba_ssm's SSD, which multiplies v by its step (here -log_alpha, with A = -1), and what it should give."""
    load_mamba_ssm()
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    def scan(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor) -> Tensor:
        return mamba_chunk_scan_combined(v, -log_alpha, -log_alpha.new_ones(v.shape[2]), k, q, 256)

    def reference(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor) -> Tensor:
        return pytorch_ssd.chunk_ssd(q, k, v * -log_alpha[..., None], log_alpha)

    return scan, reference


def fla_scan() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """fla-core's simple GLA, which wants q and k for every head, and what it should give."""
    from fla.ops.simple_gla import chunk_simple_gla

    def scan(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor) -> Tensor:
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        return chunk_simple_gla(q, k, v, log_alpha, scale=1.0)[0]

    return scan, pytorch_ssd.chunk_ssd


LOADERS: dict[str, Callable[[], tuple[Any, Any]]] = {"mamba_ssm ssd": mamba_ssm_scan, "fla simple_gla": fla_scan}


def importable_peers() -> dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]]:
    """By name, the peers that can be imported, each with its float64 reference; says why the others are not."""
    found = {}
    for name, load in LOADERS.items():
        try:
            found[name] = load()
        except ImportError as error:
            print(f"{name} is left out: {error}", flush=True)
    return found


def runs(function: Callable[[], object], name: str) -> bool:
    """Whether a peer takes the call at all; says what it raised otherwise."""
    try:
        function()
    except (RuntimeError, ValueError, TypeError, AssertionError, torch.OutOfMemoryError) as error:
        print(f"  {name} fails: {str(error).splitlines()[0] if str(error) else type(error).__name__}", flush=True)
        return False
    return True
