"""What the layers compute with: on CUDA the package `palimpsa_kernels` where it is installed, else plain PyTorch.

States are fp32 in both.
"""

import functools
import importlib
import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .scans_palimpsa import HeadParameters, Importance, States, activate, causal_conv1d, mixing_scan


@functools.cache
def _kernels() -> Any:
    if importlib.util.find_spec("palimpsa_kernels") is None:
        return None
    return importlib.import_module("palimpsa_kernels")


def fast_kernels(x: Tensor) -> Any:
    """The package of kernels for this tensor, or None."""
    return _kernels() if x.is_cuda else None


def rms_norm(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, group_size: int) -> Tensor:
    """RMSNorm of x * silu(gate) within groups of channels, in fp32 inside; the output has the weight's dtype."""
    kernels = fast_kernels(x)
    if kernels is not None:
        return kernels.gated_rms_norm(x, gate, weight, eps=eps, group_size=group_size)
    gated = x.float() if gate is None else x.float() * F.silu(gate.float())
    normed = F.rms_norm(gated.unflatten(-1, (-1, group_size)), (group_size,), eps=eps).flatten(-2)
    return (normed * weight.float()).to(weight.dtype)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor | None) -> tuple[Tensor, Tensor]:
    """`scans_palimpsa.causal_conv1d`."""
    kernels = fast_kernels(x)
    if kernels is None:
        return causal_conv1d(x, weight, bias, window)
    return kernels.causal_conv1d(x, weight, bias, initial_state=window, output_final_state=True)


def mix(
    q: Tensor,
    k: Tensor,
    x: Tensor,
    dt: Tensor,
    heads: HeadParameters,
    importance: Importance | None,
    strength: Tensor | None,
    scale: float,
    states: States | None,
) -> tuple[Tensor, States]:
    """`scans_palimpsa.mixing_scan`; one token without gradients may move `states` on in place."""
    kernels = fast_kernels(x)
    if kernels is None:
        return mixing_scan(q, k, x, dt, heads, importance, strength, scale, states)
    if states is not None and x.shape[1] == 1 and not torch.is_grad_enabled():
        return _step(kernels, q, k, x, dt, heads, importance, strength, scale, states)
    return kernels.mixing_scan(
        q,
        k,
        x,
        dt,
        kernels.HeadParameters(*heads),
        None if importance is None else kernels.Importance(*importance),
        strength=strength,
        scale=scale,
        initial_state=states,
        output_final_state=True,
    )


def _step(
    kernels: Any,
    q: Tensor,
    k: Tensor,
    x: Tensor,
    dt: Tensor,
    heads: HeadParameters,
    importance: Importance | None,
    strength: Tensor | None,
    scale: float,
    states: States,
) -> tuple[Tensor, States]:
    """One token; `states` move on in place."""
    v, log_alpha, beta = activate(x, dt, heads, importance, strength)
    q, k, v = q[:, 0], k[:, 0], v[:, 0].to(x.dtype)
    if importance is None or beta is None:
        y = kernels.ssd_step(q, k, v, log_alpha[:, 0], states[0], scale=scale)
    else:
        beta = beta[:, 0].to(x.dtype)
        y = kernels.palimpsa_step(q, k, v, beta, log_alpha[:, 0], importance[2], states, scale=scale)
    return (y[:, None].float() + heads[2][:, None] * x.float()).to(x.dtype), states
