"""The sequence mixer of `P` (Palimpsa-M) and `M` (Mamba2) layers, tensor-parallel whatever the number of groups.

Mamba2 is the same layer without importance: the scan then reads out M itself instead of M / (prior + Ibar).

Shapes use T tokens, B rows, H heads of V channels, G groups of K state channels; H and G here are this rank's share.
Each projection is a parameter of its own, so that z, x and dt split by head for every tensor-parallel size that
divides the heads. B and C split by group where that size divides the groups; otherwise every rank holds them whole,
computes the groups of its own heads, and their gradients are added up over ranks (`sum_gradient_over_tp`), as is that
of beta's first projection, whose output all heads share.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.inference.contexts import BaseInferenceContext
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from palimpsa_kernels import (
    HeadParameters,
    Importance,
    causal_conv1d,
    causal_conv1d_step,
    mixing_scan,
    palimpsa_step,
    ssd_step,
)
from palimpsa_kernels.activations import add_skip, likelihood_precision, step_and_decay, weighted_value
from torch import Tensor

from megatron_palimpsa.model.context_parallel import Exchange, crossed_part
from megatron_palimpsa.model.mixer_parts import MixerOptions, MixerState, Projected
from megatron_palimpsa.model.norm import GatedRMSNorm
from megatron_palimpsa.model.recompute import droppable
from megatron_palimpsa.model.recorder import MemoryRecorder
from megatron_palimpsa.model.tensor_parallel import make_parameter


class Mixer(MegatronModule):
    """Projections, causal convolution, scan, skip, gated norm and output projection of one layer.

    Args:
        config: gives hidden size, mamba_{state_dim, head_dim, num_groups, num_heads}, dtype and layout.
        options: the rest of the geometry.
        importance: True for Palimpsa-M, False for Mamba2.
    """

    def __init__(
        self,
        config: TransformerConfig,
        options: MixerOptions,
        importance: bool,
        d_model: int,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        pp_layer_offset: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(config)
        self.importance = importance
        self.layer_number = layer_number
        self.tp_group = pg_collection.tp
        self.cp_group = pg_collection.cp
        self.d_state = config.mamba_state_dim
        self.headdim = config.mamba_head_dim
        self.recorder: MemoryRecorder | None = None
        tp = self.tp_group.size()
        all_heads, all_groups = config.mamba_num_heads, config.mamba_num_groups
        if all_heads % tp or all_heads % all_groups:
            raise ValueError(f"{all_heads} heads are not divisible by tp={tp} or by ngroups={all_groups}")
        self.heads = all_heads // tp
        self.channels = self.heads * self.headdim
        self._choose_groups(all_heads // all_groups, all_groups)

        dtype, hidden = config.params_dtype, d_model
        self.z_weight = make_parameter(self.channels, hidden, dtype=dtype, partition_dim=0)
        self.x_weight = make_parameter(self.channels, hidden, dtype=dtype, partition_dim=0)
        self.dt_weight = make_parameter(self.heads, hidden, dtype=dtype, partition_dim=0)
        self._make_group_parameters(all_groups, hidden, options.d_conv, dtype)
        self.conv_x_weight = make_parameter(self.channels, options.d_conv, dtype=dtype, partition_dim=0)
        self.conv_x_bias = make_parameter(self.channels, dtype=dtype, partition_dim=0, weight_decay=False)
        for per_head in ("dt_bias", "A_log", "D"):
            self.register_parameter(per_head, self._per_head_parameter(dtype))
        if importance:
            rank = options.beta_rank
            self.beta_down_weight = make_parameter(rank, hidden, dtype=dtype, sum_gradient=tp > 1)
            self.beta_up_weight = make_parameter(self.channels, rank, dtype=dtype, partition_dim=0)
            self.b_scale = self._per_head_parameter(dtype)
            self.prior_log = self._per_head_parameter(dtype, trainable=options.train_prior)
        all_channels = all_heads * self.headdim
        self.norm = GatedRMSNorm(
            all_channels, options.norm_groups or all_groups, config.layernorm_epsilon, dtype, self.tp_group
        )
        self.out_proj = RowParallelLinear(
            all_channels,
            hidden,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self.tp_group,
        )

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

    def _make_group_parameters(self, all_groups: int, hidden: int, d_conv: int, dtype: torch.dtype) -> None:
        tp = self.tp_group.size()
        rows = all_groups * self.d_state // (tp if self.groups_are_split else 1)
        make = partial(
            make_parameter,
            dtype=dtype,
            partition_dim=0 if self.groups_are_split else None,
            sum_gradient=not self.groups_are_split,
        )
        for role in ("B", "C"):
            self.register_parameter(f"{role}_weight", make(rows, hidden))
            self.register_parameter(f"conv_{role}_weight", make(rows, d_conv))
            self.register_parameter(f"conv_{role}_bias", make(rows, weight_decay=False))

    def _per_head_parameter(self, dtype: torch.dtype, trainable: bool = True) -> torch.nn.Parameter:
        return make_parameter(
            self.heads, dtype=dtype, partition_dim=0, keep_fp32=True, weight_decay=False, trainable=trainable
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Mixer:
        """Parameters marked `keep_fp32` go to another device, but not to the dtype of Megatron's Float16Module."""
        kept = {name: p.data for name, p in self._parameters.items() if getattr(p, "keep_fp32", False)}
        super()._apply(fn, recurse)
        for name, value in kept.items():
            parameter = self._parameters[name]
            assert parameter is not None
            if parameter.dtype != value.dtype:
                parameter.data = value.to(parameter.device)
        return self

    def forward(
        self,
        hidden_states: Tensor,
        inference_context: BaseInferenceContext | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> tuple[Tensor, None]:
        """[T, B, h] ([T / tp, B, h] under sequence parallelism) -> (the same shape, no bias).

        With `packed_seq_params` B is 1 and documents do not see each other; with `inference_context` the tokens
        continue those that the context has seen.
        """
        u = self._enter_tensor_parallel(hidden_states).transpose(0, 1)
        z = F.linear(u, self.z_weight)
        x = F.linear(u, self.x_weight)
        bc, dt, beta_low = self._small_projections(u)
        projected = Projected(x, bc, dt, beta_low)
        if inference_context is None:
            y = self._whole(projected, packed_seq_params)
        else:
            y = self._continue(projected, inference_context)
        return self.out_proj(self.norm(y, z).transpose(0, 1))

    def _enter_tensor_parallel(self, hidden_states: Tensor) -> Tensor:
        """All tokens on every rank; one sum (or reduce-scatter) over ranks for the gradients of all projections."""
        if self.config.sequence_parallel:
            gather = partial(
                gather_from_sequence_parallel_region, tensor_parallel_output_grad=True, group=self.tp_group
            )
            return droppable(gather, hidden_states)
        return copy_to_tensor_model_parallel_region(hidden_states, group=self.tp_group)

    def _small_projections(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """B beside C [B, T, 2 G K], dt [B, T, H] and, with importance, beta's low rank, in one matrix product."""
        weights = [*self._of_groups(self.B_weight, self.C_weight), self.dt_weight]
        sizes = [2 * self.groups * self.d_state, self.heads]
        if not self.importance:
            bc, dt = F.linear(u, torch.cat(weights)).split(sizes, dim=-1)
            return bc, dt, None
        weights.append(self.beta_down_weight)
        sizes.append(self.beta_down_weight.shape[0])
        bc, dt, beta_low = F.linear(u, torch.cat(weights)).split(sizes, dim=-1)
        return bc, dt, beta_low

    def _of_groups(self, *parameters: Tensor) -> list[Tensor]:
        """The rows of B's and C's parameters that this rank's heads use."""
        rows = self.group_rows
        return list(parameters) if rows is None else [parameter[rows] for parameter in parameters]

    def _bc_filter(self) -> tuple[Tensor, Tensor]:
        weights = self._of_groups(self.conv_B_weight, self.conv_C_weight)
        return torch.cat(weights), torch.cat(self._of_groups(self.conv_B_bias, self.conv_C_bias))

    def _keys_and_queries(self, bc: Tensor) -> tuple[Tensor, Tensor]:
        """[..., 2 G K] -> B and C, each [..., G, K] with G dividing the heads."""
        k, q = bc.unflatten(-1, (2, self.groups, self.d_state)).unbind(-3)
        if self.group_of_head is None:
            return k, q
        return k[..., self.group_of_head, :], q[..., self.group_of_head, :]

    def _by_head(self, x: Tensor) -> Tensor:
        """[..., H * V] -> [..., H, V]."""
        return x.unflatten(-1, (self.heads, self.headdim))

    def _beta_logits(self, beta_low: Tensor) -> Tensor:
        """Of the likelihood precision [..., H, V]."""
        return self._by_head(droppable(F.linear, beta_low, self.beta_up_weight))

    def _whole(self, projected: Projected, packed: PackedSeqParams | None) -> Tensor:
        """Convolve and scan whole rows, or this context-parallel rank's part of one -> y [B, T, H * V]."""
        cu_seqlens = None if packed is None else packed.cu_seqlens_q
        scan: Callable[..., tuple[Tensor, tuple[Tensor, ...]]] = mixing_scan
        window_x = window_bc = None
        part = crossed_part(packed, self.cp_group)
        if part is not None and cu_seqlens is not None:
            exchange = Exchange(part, self.cp_group)
            width = self.conv_x_weight.shape[1] - 1
            window_x, window_bc = exchange.windows(projected.x, projected.bc, width, len(cu_seqlens) - 1)
            scan = exchange.scan

        def convolve(x: Tensor, weight: Tensor, bias: Tensor, window: Tensor | None) -> Tensor:
            return causal_conv1d(x, weight, bias, initial_state=window, cu_seqlens=cu_seqlens)

        x = droppable(convolve, projected.x, self.conv_x_weight, self.conv_x_bias, window_x)
        bc = droppable(convolve, projected.bc, *self._bc_filter(), window_bc)
        y, _ = self._scan(x, bc, projected, cu_seqlens, self.recorder is not None, scan)
        return y

    def _scan(
        self,
        x: Tensor,
        bc: Tensor,
        projected: Projected,
        cu_seqlens: Tensor | None,
        keep_memory: bool,
        scan: Callable[..., tuple[Tensor, tuple[Tensor, ...]]],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x [B, T, H * V] and bc behind the convolution -> (y as x, final states or ()); `scan` is as `mixing_scan`."""
        k, q = self._keys_and_queries(bc)
        importance = None
        if projected.beta_low is not None:
            importance = Importance(self._beta_logits(projected.beta_low), self.b_scale, self.prior_log.exp())
        y, memory = scan(
            q,
            k,
            self._by_head(x),
            projected.dt,
            HeadParameters(self.dt_bias, self.A_log, self.D),
            importance,
            output_final_state=keep_memory,
            cu_seqlens=cu_seqlens,
        )
        if self.recorder is not None:
            _, log_alpha = step_and_decay(projected.dt, self.dt_bias, self.A_log)
            recorded = None if importance is None else (importance.prior, memory[1])
            self.recorder.record(self.layer_number, log_alpha, recorded, cu_seqlens)
        return y.flatten(-2), memory

    def _continue(self, projected: Projected, context: BaseInferenceContext) -> Tensor:
        """Convolve and scan tokens that follow those in `context`, and keep the states behind them there."""
        cache = context.key_value_memory_dict
        state = cache.get(self.layer_number) if context.sequence_len_offset else None
        if state is not None and projected.x.shape[1] == 1:
            return self._step(projected, state)
        window_x, window_bc, memory = (state.conv_x, state.conv_bc, state.memory) if state else (None, None, None)
        x, window_x = causal_conv1d(
            projected.x, self.conv_x_weight, self.conv_x_bias, initial_state=window_x, output_final_state=True
        )
        bc, window_bc = causal_conv1d(
            projected.bc, *self._bc_filter(), initial_state=window_bc, output_final_state=True
        )
        y, memory = self._scan(x, bc, projected, None, True, partial(mixing_scan, initial_state=memory))
        cache[self.layer_number] = MixerState(window_x, window_bc, memory)
        return y

    def _step(self, projected: Projected, state: MixerState) -> Tensor:
        """One token -> y [B, 1, H * V]; `state` moves on in place."""
        x = causal_conv1d_step(projected.x[:, 0], state.conv_x, self.conv_x_weight, self.conv_x_bias)
        k, q = self._keys_and_queries(causal_conv1d_step(projected.bc[:, 0], state.conv_bc, *self._bc_filter()))
        x = self._by_head(x)
        dt, log_alpha = step_and_decay(projected.dt[:, 0], self.dt_bias, self.A_log)
        value = weighted_value(x, dt)
        if projected.beta_low is None:
            y = ssd_step(q, k, value, log_alpha, state.memory[0])
        else:
            beta = likelihood_precision(self._beta_logits(projected.beta_low[:, 0]), self.b_scale, dt)
            states = state.memory[0], state.memory[1]
            y = palimpsa_step(q, k, value, beta, log_alpha, self.prior_log.exp(), states)
        return add_skip(y, x, self.D).flatten(-2).unsqueeze(1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """For dist_checkpointing: split parameters with their offsets, whole ones as replicas."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own = dict(self._parameters)
        split = {name: 0 for name, parameter in own.items() if parameter.tensor_model_parallel}
        sharded = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            split,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            sharded.update(
                sharded_state_dict_default(
                    module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
                )
            )
        return sharded
