"""The layers of a hybrid model: norm, mixer, attention or gated MLP, residual."""

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache

from .attention_palimpsa import PalimpsaAttention
from .configuration_palimpsa import PalimpsaHybridConfig
from .mixers_palimpsa import PalimpsaMixerD, PalimpsaMixerM
from .norms_palimpsa import PalimpsaRMSNorm


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
            kind = PalimpsaMixerM if letter in "PM" else PalimpsaMixerD
            self.mixer = kind(config, layer_idx, importance=letter in "PQ")

    def forward(self, hidden: Tensor, cache: Cache | None = None, padding: Tensor | None = None) -> Tensor:
        """hidden [B, T, hidden size]; padding [B, L] of all tokens so far."""
        if padding is not None and not isinstance(self.mixer, PalimpsaAttention):
            padding = padding[:, -hidden.shape[1] :]
        mixed = self.mixer(self.norm(hidden), cache=cache, padding=padding)
        return (hidden.float() if self.residual_in_fp32 else hidden) + mixed
