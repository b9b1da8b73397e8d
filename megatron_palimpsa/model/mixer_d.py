"""The mixer of `Q` (Palimpsa-D, arXiv 2602.09075) and `L` layers, which are `Q` without importance.

    q, k, v  = silu(conv(W u)) each; q and k are divided by their L2 norm within each head, scale = K ** -0.5
    bs       = sigmoid(W_s u), one a head: v* = v bs and beta = sigmoid(W_b2 W_b1 u) softplus(b_scale) bs
    out      = W_out (rms(y + D v) silu(W_g u)), the root mean square taken within each head

Every head has keys and queries of its own, so that all but beta's first projection and the norm's weight, which heads
share, is split over tensor-parallel ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from palimpsa_kernels import gated_rms_norm
from torch import Tensor

from megatron_palimpsa.model.mixer import Mixer
from megatron_palimpsa.model.mixer_parts import Filter, MixerOptions, Projected
from megatron_palimpsa.model.norm import HeadRMSNorm
from megatron_palimpsa.model.recompute import droppable
from megatron_palimpsa.model.tensor_parallel import make_parameter

SMALLEST_NORM = 1e-6
"""A key or query of a smaller L2 norm is not divided by it alone: x / sqrt(|x|^2 + SMALLEST_NORM^2)."""


class MixerD(Mixer):
    """Palimpsa-D's projections and norm around what mixers share."""

    def _make_inputs(self, options: MixerOptions) -> None:
        self.scale = self.d_state**-0.5
        keys = self.heads * self.d_state
        for role, rows in (("g", self.channels), ("v", self.channels), ("k", keys), ("q", keys)):
            self.register_parameter(f"{role}_weight", self._projection(rows))
        for per_head in ("s", "dt"):
            self.register_parameter(f"{per_head}_weight", self._projection(self.heads))
        dtype = self.config.params_dtype
        for role, rows in (("v", self.channels), ("k", keys), ("q", keys)):
            weight = make_parameter(rows, options.d_conv, dtype=dtype, partition_dim=0)
            self.register_parameter(f"conv_{role}_weight", weight)

    def _make_norm(self, options: MixerOptions) -> HeadRMSNorm:
        config = self.config
        return HeadRMSNorm(self.headdim, config.layernorm_epsilon, config.params_dtype, self.tp_group.size())

    def _project(self, u: Tensor) -> tuple[Tensor, Projected]:
        gate = F.linear(u, self.g_weight)
        v = F.linear(u, self.v_weight)
        weights = [self.k_weight, self.q_weight]
        kq, [strength, dt], beta_low = self._side_by_side(u, weights, self.s_weight, self.dt_weight)
        return gate, Projected(v, kq, dt, beta_low, strength)

    def _x_filter(self) -> Filter:
        return self.conv_v_weight, None

    def _bc_filter(self) -> Filter:
        return torch.cat([self.conv_k_weight, self.conv_q_weight]), None

    def _keys_and_queries(self, bc: Tensor) -> tuple[Tensor, Tensor]:
        units = droppable(_unit_vectors, bc, self.d_state)
        k, q = units.unflatten(-1, (2, self.heads, self.d_state)).unbind(-3)
        return k, q


def _unit_vectors(x: Tensor, size: int) -> Tensor:
    """[..., n * size] -> as many vectors of `size`, each divided by its L2 norm in fp32; in x's dtype."""
    # As an RMSNorm with a fixed weight: one pass over memory on CUDA.
    weight = x.new_full((x.shape[-1],), size**-0.5, dtype=torch.float32)
    return gated_rms_norm(x, None, weight, eps=SMALLEST_NORM**2 / size, group_size=size).to(x.dtype)
