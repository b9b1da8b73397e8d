"""The mixer of `P` (Palimpsa-M) and `M` (Mamba2) layers, tensor-parallel whatever the number of groups.

Mamba2 is the same layer without importance. k = B, q = C, v* = x dt, beta carries dt; the gate comes before the norm.

B and C split by group where the tensor-parallel size divides the groups; otherwise every rank holds them whole,
computes the groups of its own heads, and their gradients are added up over ranks (`sum_gradient_over_tp`).
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_palimpsa.model.mixer import Mixer
from megatron_palimpsa.model.mixer_parts import Filter, MixerOptions, Projected
from megatron_palimpsa.model.norm import GatedRMSNorm
from megatron_palimpsa.model.tensor_parallel import make_parameter


class MixerM(Mixer):
    """Mamba2's projections and gated norm around what mixers share; `config.mamba_num_groups` are those of B and C."""

    def _make_inputs(self, options: MixerOptions) -> None:
        all_heads, all_groups = self.config.mamba_num_heads, self.config.mamba_num_groups
        if all_heads % all_groups:
            raise ValueError(f"{all_heads} heads are not divisible by ngroups={all_groups}")
        self._choose_groups(all_heads // all_groups, all_groups)
        self.z_weight = self._projection(self.channels)
        self.x_weight = self._projection(self.channels)
        self.dt_weight = self._projection(self.heads)
        self._make_group_parameters(all_groups, options.d_conv)
        dtype = self.config.params_dtype
        self.conv_x_weight = make_parameter(self.channels, options.d_conv, dtype=dtype, partition_dim=0)
        self.conv_x_bias = make_parameter(self.channels, dtype=dtype, partition_dim=0, weight_decay=False)

    def _make_norm(self, options: MixerOptions) -> GatedRMSNorm:
        config = self.config
        groups = options.norm_groups or config.mamba_num_groups
        channels = config.mamba_num_heads * self.headdim
        return GatedRMSNorm(channels, groups, config.layernorm_epsilon, config.params_dtype, self.tp_group)

    def _choose_groups(self, heads_per_group: int, all_groups: int) -> None:
        """Which rows of this rank's B and C parameters its heads need, and how its heads share them."""
        tp = self.tp_group.size()
        self.groups_are_split = all_groups % tp == 0
        first_head = 0 if self.groups_are_split else self.tp_group.rank() * self.heads
        group_of_head = torch.arange(first_head, first_head + self.heads) // heads_per_group
        first, last = int(group_of_head[0]), int(group_of_head[-1])
        self.groups = last - first + 1
        held = all_groups // tp if self.groups_are_split else all_groups
        rows = slice(first * self.d_state, (last + 1) * self.d_state)
        # None for all of them: a slice that leaves nothing out would take a copy of its gradient.
        self.group_rows = None if self.groups == held else rows
        counts = torch.bincount(group_of_head - first)
        # The scan wants as many heads in each group; where a rank's border cuts a group, each head gets its own copy.
        self.group_of_head: list[int] | None = (
            None if bool((counts == counts[0]).all()) else (group_of_head - first).tolist()
        )

    def _make_group_parameters(self, all_groups: int, d_conv: int) -> None:
        tp = self.tp_group.size()
        rows = all_groups * self.d_state // (tp if self.groups_are_split else 1)
        make = partial(
            make_parameter,
            dtype=self.config.params_dtype,
            partition_dim=0 if self.groups_are_split else None,
            sum_gradient=not self.groups_are_split,
        )
        for role in ("B", "C"):
            self.register_parameter(f"{role}_weight", make(rows, self.d_model))
            self.register_parameter(f"conv_{role}_weight", make(rows, d_conv))
            self.register_parameter(f"conv_{role}_bias", make(rows, weight_decay=False))

    def _project(self, u: Tensor) -> tuple[Tensor, Projected]:
        z = F.linear(u, self.z_weight)
        x = F.linear(u, self.x_weight)
        bc, [dt], beta_low = self._side_by_side(u, self._of_groups(self.B_weight, self.C_weight), self.dt_weight)
        return z, Projected(x, bc, dt, beta_low)

    def _x_filter(self) -> Filter:
        return self.conv_x_weight, self.conv_x_bias

    def _of_groups(self, *parameters: Tensor) -> list[Tensor]:
        """The rows of B's and C's parameters that this rank's heads use."""
        rows = self.group_rows
        return list(parameters) if rows is None else [parameter[rows] for parameter in parameters]

    def _bc_filter(self) -> Filter:
        weights = self._of_groups(self.conv_B_weight, self.conv_C_weight)
        return torch.cat(weights), torch.cat(self._of_groups(self.conv_B_bias, self.conv_C_bias))

    def _keys_and_queries(self, bc: Tensor) -> tuple[Tensor, Tensor]:
        k, q = bc.unflatten(-1, (2, self.groups, self.d_state)).unbind(-3)
        if self.group_of_head is None:
            return k, q
        return k[..., self.group_of_head, :], q[..., self.group_of_head, :]
