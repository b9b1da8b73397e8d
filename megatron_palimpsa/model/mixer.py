"""What the sequence mixers of all layers share: convolution, scan, state cache, beta, skip, output projection.

`mixer_m.py` has the mixer of `P` (Palimpsa-M) and `M` (Mamba2) layers, `mixer_d.py` that of `Q` (Palimpsa-D) and `L`
layers. Without importance the scan reads out M itself instead of M / (prior + Ibar).

Shapes use T tokens, B rows, H heads of V channels, G groups of K state channels; H and G here are this rank's share.
Each projection is a parameter of its own, so that what is per head splits for every tensor-parallel size that divides
the heads. What ranks hold whole is marked, and its gradients are added up over ranks (`sum_gradient_over_tp`), as is
that of beta's first projection, whose output all heads share.
"""

from __future__ import annotations

from abc import abstractmethod
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
from palimpsa_kernels.activations import (
    add_skip,
    likelihood_precision,
    step_and_decay,
    weighted_value,
    write_strength,
)
from torch import Tensor, nn

from megatron_palimpsa.model.context_parallel import Exchange, crossed_part
from megatron_palimpsa.model.mixer_parts import Filter, MixerOptions, MixerState, Projected
from megatron_palimpsa.model.recompute import droppable
from megatron_palimpsa.model.recorder import Recorder
from megatron_palimpsa.model.tensor_parallel import make_parameter


class Mixer(MegatronModule):
    """Convolution, scan, skip and output projection of one layer, between projections and a norm of its kind.

    A kind of mixer makes its projections and filters (`_make_inputs`) and its norm (`_make_norm`), and says what they
    give.

    Args:
        config: gives hidden size, mamba_{state_dim, head_dim, num_heads}, dtype and layout.
        options: the rest of the geometry.
        importance: False leaves the second state out.
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
        self.d_model = d_model
        self.layer_number = layer_number
        self.tp_group = pg_collection.tp
        self.cp_group = pg_collection.cp
        self.d_state = config.mamba_state_dim
        self.headdim = config.mamba_head_dim
        self.recorder: Recorder | None = None
        tp = self.tp_group.size()
        all_heads = config.mamba_num_heads
        if all_heads % tp:
            raise ValueError(f"{all_heads} heads are not divisible by tp={tp}")
        self.heads = all_heads // tp
        self.channels = self.heads * self.headdim
        self.scale = 1.0

        self._make_inputs(options)
        for per_head in ("dt_bias", "A_log", "D"):
            self.register_parameter(per_head, self._per_head_parameter())
        if importance:
            rank = options.beta_rank
            self.beta_down_weight = make_parameter(rank, d_model, dtype=config.params_dtype, sum_gradient=tp > 1)
            self.beta_up_weight = make_parameter(self.channels, rank, dtype=config.params_dtype, partition_dim=0)
            self.b_scale = self._per_head_parameter()
            self.prior_log = self._per_head_parameter(trainable=options.train_prior)
        self.norm = self._make_norm(options)
        self.out_proj = RowParallelLinear(
            all_heads * self.headdim,
            d_model,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self.tp_group,
        )

    def _projection(self, rows: int) -> nn.Parameter:
        """Of the layer's input onto this rank's `rows` channels."""
        return make_parameter(rows, self.d_model, dtype=self.config.params_dtype, partition_dim=0)

    def _per_head_parameter(self, trainable: bool = True) -> nn.Parameter:
        return make_parameter(
            self.heads,
            dtype=self.config.params_dtype,
            partition_dim=0,
            keep_fp32=True,
            weight_decay=False,
            trainable=trainable,
        )

    @abstractmethod
    def _make_inputs(self, options: MixerOptions) -> None:
        """Parameters in front of the scan that are not per head."""

    @abstractmethod
    def _make_norm(self, options: MixerOptions) -> nn.Module:
        """(y, z), each [B, T, H * V] -> what the output projection takes."""

    @abstractmethod
    def _project(self, u: Tensor) -> tuple[Tensor, Projected]:
        """The layer's input [B, T, h] -> gate z [B, T, H * V] and what convolution and scan take."""

    @abstractmethod
    def _x_filter(self) -> Filter:
        """Of the convolution over x."""

    @abstractmethod
    def _bc_filter(self) -> Filter:
        """Of the convolution over keys beside queries."""

    @abstractmethod
    def _keys_and_queries(self, bc: Tensor) -> tuple[Tensor, Tensor]:
        """Behind the convolution [..., 2 G K] -> keys and queries, each [..., G, K] with G dividing the heads."""

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
        u = _swapped(self._enter_tensor_parallel(hidden_states))
        z, projected = self._project(u)
        if inference_context is None:
            y = self._whole(projected, packed_seq_params)
        else:
            y = self._continue(projected, inference_context)
        return self.out_proj(_swapped(self.norm(y, z)))

    def _enter_tensor_parallel(self, hidden_states: Tensor) -> Tensor:
        """All tokens on every rank; one sum (or reduce-scatter) over ranks for the gradients of all projections."""
        if self.config.sequence_parallel:
            gather = partial(
                gather_from_sequence_parallel_region, tensor_parallel_output_grad=True, group=self.tp_group
            )
            return droppable(gather, hidden_states)
        return copy_to_tensor_model_parallel_region(hidden_states, group=self.tp_group)

    def _side_by_side(
        self, u: Tensor, bc: list[Tensor], *per_head: Tensor
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """Projections in one matrix product: keys beside queries, each of `per_head`, with importance beta's low rank.

        Args:
            u: [B, T, h].
            bc: weights of keys and queries, together [2 G K, h].
            per_head: other weights [H, h].

        Returns:
            [B, T, 2 G K]; a [B, T, H] for each of `per_head`; [B, T, beta_rank] or None.
        """
        weights = [*bc, *per_head]
        sizes = [sum(len(weight) for weight in bc), *(len(weight) for weight in per_head)]
        if self.importance:
            weights.append(self.beta_down_weight)
            sizes.append(len(self.beta_down_weight))
        first, *others = F.linear(u, torch.cat(weights)).split(sizes, dim=-1)
        return first, others[: len(per_head)], others[-1] if self.importance else None

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
            width = self._x_filter()[0].shape[1] - 1
            window_x, window_bc = exchange.windows(projected.x, projected.bc, width, len(cu_seqlens) - 1)
            scan = exchange.scan

        def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor | None) -> Tensor:
            return causal_conv1d(x, weight, bias, initial_state=window, cu_seqlens=cu_seqlens)

        x = droppable(convolve, projected.x, *self._x_filter(), window_x)
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
            strength=projected.strength,
            scale=self.scale,
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
        x, window_x = causal_conv1d(projected.x, *self._x_filter(), initial_state=window_x, output_final_state=True)
        bc, window_bc = causal_conv1d(
            projected.bc, *self._bc_filter(), initial_state=window_bc, output_final_state=True
        )
        y, memory = self._scan(x, bc, projected, None, True, partial(mixing_scan, initial_state=memory))
        cache[self.layer_number] = MixerState(window_x, window_bc, memory)
        return y

    def _step(self, projected: Projected, state: MixerState) -> Tensor:
        """One token -> y [B, 1, H * V]; `state` moves on in place."""
        x = causal_conv1d_step(projected.x[:, 0], state.conv_x, *self._x_filter())
        k, q = self._keys_and_queries(causal_conv1d_step(projected.bc[:, 0], state.conv_bc, *self._bc_filter()))
        x = self._by_head(x)
        dt, log_alpha = step_and_decay(projected.dt[:, 0], self.dt_bias, self.A_log)
        write = write_strength(dt, None if projected.strength is None else projected.strength[:, 0])
        value = weighted_value(x, write)
        if projected.beta_low is None:
            y = ssd_step(q, k, value, log_alpha, state.memory[0], scale=self.scale)
        else:
            beta = likelihood_precision(self._beta_logits(projected.beta_low[:, 0]), self.b_scale, write)
            states = state.memory[0], state.memory[1]
            y = palimpsa_step(q, k, value, beta, log_alpha, self.prior_log.exp(), states, scale=self.scale)
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


def _swapped(x: Tensor) -> Tensor:
    """[T, B, ...] -> [B, T, ...] or back, laid out anew once; else every product with it would do so, twice."""
    swapped = x.transpose(0, 1)
    return swapped if swapped.is_contiguous() else droppable(Tensor.contiguous, swapped)
