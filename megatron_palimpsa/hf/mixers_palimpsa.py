"""The layers with matrix states: Palimpsa-M and Mamba2, Palimpsa-D with and without importance."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import Cache

from .configuration_palimpsa import PalimpsaHybridConfig
from .kernels_palimpsa import convolve, mix, rms_norm
from .norms_palimpsa import PalimpsaHeadRMSNorm, PalimpsaRMSNorm
from .scans_palimpsa import States

FP32_PARAMETERS = ("A_log", "D", "dt_bias", "b_scale", "prior_log")
"""What decides over decays and states stays fp32 in a model of any dtype."""
STILL = -1e4
"""dt before its softplus, and strength before its sigmoid, of a token that changes no state: 0 in bf16 and fp16 too."""
SMALLEST_NORM = 1e-6
"""A key or query of a smaller L2 norm is not divided by it alone: x / sqrt(|x|^2 + SMALLEST_NORM^2)."""


class PalimpsaMixer(nn.Module):
    """What the mixers of all kinds share; a kind adds its norm, which takes the scan's output and the gate.

    `in_proj` holds the rows of the gate, of values, keys and queries, which `conv1d` filters, and of `steps` numbers a
    head: dt alone, or how strongly a token is written, then dt.

    Args:
        importance: False leaves the second state out.
        groups: of heads that share keys and queries.
        filter_bias: `conv1d` has a bias.
    """

    norm: nn.Module
    dt_bias: nn.Parameter
    A_log: nn.Parameter
    D: nn.Parameter
    b_scale: nn.Parameter
    prior_log: nn.Parameter

    def __init__(
        self, config: PalimpsaHybridConfig, layer_idx: int, importance: bool, groups: int, steps: int, filter_bias: bool
    ) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.importance = importance
        self.scale = 1.0
        self.head_dim = config.mamba_head_dim
        self.heads = config.num_heads
        self.groups = groups
        state = self.groups * config.state_size
        channels = config.inner_size + 2 * state
        self.sizes = [config.inner_size, channels, *[self.heads] * steps]
        self.conv_sizes = [config.inner_size, state, state]
        self.in_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=False)
        self.conv1d = nn.Conv1d(channels, channels, config.conv_kernel, groups=channels, bias=filter_bias)
        for name in ("A_log", "D", "dt_bias"):
            self.register_parameter(name, nn.Parameter(torch.ones(self.heads)))
        if importance:
            self.beta_down = nn.Linear(config.hidden_size, config.beta_rank, bias=False)
            self.beta_up = nn.Linear(config.beta_rank, config.inner_size, bias=False)
            for name in ("b_scale", "prior_log"):
                self.register_parameter(name, nn.Parameter(torch.ones(self.heads)))
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
        gate, xkq, *steps = self.in_proj(u).split(self.sizes, dim=-1)
        if padding is not None:
            xkq = xkq.masked_fill(padding[..., None], 0.0)
            steps = [step.masked_fill(padding[..., None], STILL) for step in steps]
        window, states = self._read(cache)
        xkq, window = convolve(xkq, self.conv1d.weight[:, 0], self.conv1d.bias, window)
        x, k, q = xkq.split(self.conv_sizes, dim=-1)
        x = x.unflatten(-1, (self.heads, self.head_dim))
        k, q = (self._vectors(part).unflatten(-1, (self.groups, -1)) for part in (k, q))
        importance = None
        if self.importance:
            logits = self.beta_up(self.beta_down(u)).unflatten(-1, (self.heads, self.head_dim))
            importance = logits, self.b_scale, self.prior_log.exp()
        heads = self.dt_bias, self.A_log, self.D
        strength = steps[0] if len(steps) > 1 else None
        y, states = mix(q, k, x, steps[-1], heads, importance, strength, self.scale, states)
        self._write(cache, window, states)
        return self.out_proj(self.norm(y.flatten(-2), gate))

    def _vectors(self, x: Tensor) -> Tensor:
        """Keys or queries behind the convolution [..., G * K] -> as the scan takes them."""
        return x

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


class PalimpsaMixerM(PalimpsaMixer):
    """A `P` (with importance) or `M` layer's mixer; the parameters have Hugging Face Mamba2's names and shapes."""

    def __init__(self, config: PalimpsaHybridConfig, layer_idx: int, importance: bool) -> None:
        super().__init__(config, layer_idx, importance, config.n_groups, steps=1, filter_bias=True)
        norm_groups = config.norm_groups or config.n_groups
        self.norm = PalimpsaRMSNorm(config.inner_size, config.layer_norm_epsilon, norm_groups)


class PalimpsaMixerD(PalimpsaMixer):
    """A `Q` (with importance) or `L` layer's mixer: every head has keys and queries of its own, of unit length."""

    def __init__(self, config: PalimpsaHybridConfig, layer_idx: int, importance: bool) -> None:
        super().__init__(config, layer_idx, importance, config.num_heads, steps=2, filter_bias=False)
        self.key_dim = config.state_size
        self.scale = self.key_dim**-0.5
        self.norm = PalimpsaHeadRMSNorm(self.head_dim, config.layer_norm_epsilon)

    def _vectors(self, x: Tensor) -> Tensor:
        # As an RMSNorm with a fixed weight: one pass over memory in the kernels.
        weight = x.new_full((x.shape[-1],), self.scale, dtype=torch.float32)
        return rms_norm(x, None, weight, SMALLEST_NORM**2 / self.key_dim, self.key_dim).to(x.dtype)
