"""The layers of a hybrid model: norms, Palimpsa-M and Mamba2 mixers, gated MLP, and attention around its module.

On CUDA the kernels of the package `palimpsa_kernels` run where it is installed, plain PyTorch (`scans_palimpsa`)
otherwise. States are fp32 in both.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache

from .attention_palimpsa import PalimpsaAttention
from .configuration_palimpsa import PalimpsaHybridConfig
from .scans_palimpsa import Importance, States, activate, causal_conv1d, mixing_scan

FP32_PARAMETERS = ("A_log", "D", "dt_bias", "b_scale", "prior_log")
"""What decides over decays and states stays fp32 in a model of any dtype."""
STILL = -1e4
"""dt, before its softplus, of a token that changes no state: softplus gives 0, in bf16 and fp16 too."""


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


class PalimpsaRMSNorm(nn.Module):
    """Over all channels, or, with a gate, within `groups` of them."""

    def __init__(self, channels: int, eps: float, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.eps = eps
        self.group_size = channels // groups

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """x, gate [..., channels] -> the same shape in the weight's dtype."""
        return rms_norm(x, gate, self.weight, self.eps, self.group_size)


class PalimpsaMixer(nn.Module):
    """A `P` (with importance) or `M` layer's mixer; the parameters have Hugging Face Mamba2's names and shapes."""

    dt_bias: nn.Parameter
    A_log: nn.Parameter
    D: nn.Parameter
    b_scale: nn.Parameter
    prior_log: nn.Parameter

    def __init__(self, config: PalimpsaHybridConfig, layer_idx: int, importance: bool) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.importance = importance
        self.head_dim = config.mamba_head_dim
        self.heads = config.inner_size // self.head_dim
        self.groups = config.n_groups
        state = self.groups * config.state_size
        self.sizes = [config.inner_size, config.inner_size + 2 * state, self.heads]
        self.conv_sizes = [config.inner_size, state, state]
        self.in_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=False)
        channels = self.sizes[1]
        self.conv1d = nn.Conv1d(channels, channels, config.conv_kernel, groups=channels)
        for name in ("A_log", "D", "dt_bias"):
            self.register_parameter(name, nn.Parameter(torch.ones(self.heads)))
        if importance:
            self.beta_down = nn.Linear(config.hidden_size, config.beta_rank, bias=False)
            self.beta_up = nn.Linear(config.beta_rank, config.inner_size, bias=False)
            for name in ("b_scale", "prior_log"):
                self.register_parameter(name, nn.Parameter(torch.ones(self.heads)))
        norm_groups = config.norm_groups or config.n_groups
        self.norm = PalimpsaRMSNorm(config.inner_size, config.layer_norm_epsilon, norm_groups)
        self.out_proj = nn.Linear(config.inner_size, config.hidden_size, bias=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PalimpsaMixer":
        """FP32_PARAMETERS go to another device, but to no other dtype."""
        kept = {name: getattr(self, name).data for name in FP32_PARAMETERS if name in self._parameters}
        super()._apply(fn, recurse)
        for name, value in kept.items():
            parameter = getattr(self, name)
            if parameter.dtype != value.dtype:
                parameter.data = value.to(parameter.device)
        return self

    def forward(self, u: Tensor, cache: Cache | None = None, padding: Tensor | None = None) -> Tensor:
        """Mix.

        Args:
            u: [B, T, hidden size].
            cache: of the tokens before, moves on in place.
            padding: [B, T], True where a token is none: it neither writes nor decays, and the convolution sees zeros.

        Returns:
            [B, T, hidden size].
        """
        z, xbc, dt = self.in_proj(u).split(self.sizes, dim=-1)
        if padding is not None:
            xbc = xbc.masked_fill(padding[..., None], 0.0)
            dt = dt.masked_fill(padding[..., None], STILL)
        window, states = self._read(cache)
        xbc, window = self._convolve(xbc, window)
        x, k, q = xbc.split(self.conv_sizes, dim=-1)
        x = x.unflatten(-1, (self.heads, self.head_dim))
        k, q = (part.unflatten(-1, (self.groups, -1)) for part in (k, q))
        importance = None
        if self.importance:
            logits = self.beta_up(self.beta_down(u)).unflatten(-1, (self.heads, self.head_dim))
            importance = logits, self.b_scale, self.prior_log.exp()
        y, states = self._scan(q, k, x, dt, importance, states)
        self._write(cache, window, states)
        return self.out_proj(self.norm(y.flatten(-2), z))

    def _convolve(self, xbc: Tensor, window: Tensor | None) -> tuple[Tensor, Tensor]:
        weight, bias = self.conv1d.weight[:, 0], self.conv1d.bias
        kernels = fast_kernels(xbc)
        if kernels is None:
            return causal_conv1d(xbc, weight, bias, window)
        return kernels.causal_conv1d(xbc, weight, bias, initial_state=window, output_final_state=True)

    def _scan(
        self, q: Tensor, k: Tensor, x: Tensor, dt: Tensor, importance: Importance | None, states: States | None
    ) -> tuple[Tensor, States]:
        heads = self.dt_bias, self.A_log, self.D
        kernels = fast_kernels(x)
        if kernels is None:
            return mixing_scan(q, k, x, dt, heads, importance, states)
        if states is not None and x.shape[1] == 1 and not torch.is_grad_enabled():
            return self._step(kernels, q, k, x, dt, importance, states)
        return kernels.mixing_scan(
            q,
            k,
            x,
            dt,
            kernels.HeadParameters(*heads),
            None if importance is None else kernels.Importance(*importance),
            initial_state=states,
            output_final_state=True,
        )

    def _step(
        self, kernels: Any, q: Tensor, k: Tensor, x: Tensor, dt: Tensor, importance: Importance | None, states: States
    ) -> tuple[Tensor, States]:
        """One token; `states` move on in place."""
        v, log_alpha, beta = activate(x, dt, (self.dt_bias, self.A_log, self.D), importance)
        q, k, v = q[:, 0], k[:, 0], v[:, 0].to(x.dtype)
        if importance is None or beta is None:
            y = kernels.ssd_step(q, k, v, log_alpha[:, 0], states[0])
        else:
            y = kernels.palimpsa_step(q, k, v, beta[:, 0].to(x.dtype), log_alpha[:, 0], importance[2], states)
        return (y[:, None].float() + self.D[:, None] * x.float()).to(x.dtype), states

    def _read(self, cache: Cache | None) -> tuple[Tensor | None, States | None]:
        """The window and states in the cache; None, None where it has none yet."""
        if cache is None or (window := cache.get_conv_state(self.layer_idx)) is None:
            return None, None
        kept = cache.layers[self.layer_idx].recurrent_states
        return window, tuple(kept[index] for index in range(2 if self.importance else 1))

    def _write(self, cache: Cache | None, window: Tensor, states: States) -> None:
        if cache is None:
            return
        cache.update_conv_state(window, self.layer_idx)
        kept = cache.layers[self.layer_idx].recurrent_states
        for index, state in enumerate(states):
            if kept[index] is not state:
                cache.update_recurrent_state(state, self.layer_idx, state_idx=index)


class PalimpsaMLP(nn.Module):
    """down(silu(gate(u)) * up(u)); `gate_up_proj` holds the gate's rows, then the others."""

    def __init__(self, config: PalimpsaHybridConfig) -> None:
        super().__init__()
        assert config.intermediate_size is not None
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, u: Tensor, cache: Cache | None = None, padding: Tensor | None = None) -> Tensor:
        """u [B, T, hidden size]; tokens do not meet here."""
        gate, up = self.gate_up_proj(u).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class PalimpsaLayer(nn.Module):
    """Norm, mixer, residual."""

    def __init__(self, config: PalimpsaHybridConfig, layer_idx: int) -> None:
        super().__init__()
        self.residual_in_fp32 = config.residual_in_fp32
        self.norm = PalimpsaRMSNorm(config.hidden_size, config.layer_norm_epsilon)
        letter = config.pattern[layer_idx]
        self.mixer: nn.Module
        if letter == "*":
            self.mixer = PalimpsaAttention(config, layer_idx)
        elif letter == "-":
            self.mixer = PalimpsaMLP(config)
        else:
            self.mixer = PalimpsaMixer(config, layer_idx, importance=letter == "P")

    def forward(self, hidden: Tensor, cache: Cache | None = None, padding: Tensor | None = None) -> Tensor:
        """hidden [B, T, hidden size]; padding [B, L] of all tokens so far."""
        if padding is not None and not isinstance(self.mixer, PalimpsaAttention):
            padding = padding[:, -hidden.shape[1] :]
        mixed = self.mixer(self.norm(hidden), cache=cache, padding=padding)
        return (hidden.float() if self.residual_in_fp32 else hidden) + mixed
