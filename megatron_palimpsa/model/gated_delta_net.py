"""Megatron's Gated DeltaNet (arXiv 2412.06464) as `G` layers, a baseline; its kernels are flash-linear-attention's.

Megatron projects queries, keys, values, gate and two numbers a head in one matrix, and their parts are not split one by
one where a checkpoint goes to another tensor-parallel size; under context parallelism it expects a zigzag of parts. The
configuration refuses both.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.inference.contexts import BaseInferenceContext
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.model.norm import RMSNorm
from megatron_palimpsa.model.tensor_parallel import make_parameter


def require_kernels() -> None:
    """Raises ConfigError where flash-linear-attention or a GPU is missing."""
    for missing, what in ((not common.HAVE_FLA, "flash-linear-attention"), (not torch.cuda.is_available(), "a GPU")):
        if missing:
            raise ConfigError(
                f"model.pattern has Gated DeltaNet layers (G), which need {what}: they run kernels of "
                f"flash-linear-attention (pip install flash-linear-attention) on GPUs"
            )


class HeadNorm(nn.RMSNorm):
    """RMSNorm of one head's channels, without the steps of our own that torch.compile cannot follow."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight = make_parameter(hidden_size, dtype=config.params_dtype, weight_decay=False)


class GatedDeltaNetMixer(GatedDeltaNet):
    """Megatron's module with our marks: A_log and dt_bias in fp32, no weight decay on vectors."""

    def __init__(self, config: TransformerConfig, submodules: GatedDeltaNetSubmodules, **kwargs: Any) -> None:
        super().__init__(config, submodules, **kwargs)
        for name in ("A_log", "dt_bias"):
            heads = len(getattr(self, name))
            setattr(self, name, _per_head(heads, config.params_dtype))
        self.conv1d.weight.partition_stride = 1  # type: ignore[attr-defined]

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        inference_context: BaseInferenceContext | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[T, B, h] -> (the same shape, no bias); each document by itself.

        Raises:
            ConfigError: asked to go on from earlier tokens.
        """
        if inference_context is not None:
            raise ConfigError("Gated DeltaNet layers (G) keep no states here: such a model cannot generate")
        if packed_seq_params is not None:
            packed_seq_params = _padding_in_last_document(packed_seq_params, len(hidden_states))
        return super().forward(hidden_states, attention_mask, packed_seq_params=packed_seq_params, **kwargs)


def _per_head(heads: int, dtype: torch.dtype) -> nn.Parameter:
    return make_parameter(heads, dtype=dtype, partition_dim=0, keep_fp32=True, weight_decay=False)


def _padding_in_last_document(packed: PackedSeqParams, tokens: int) -> PackedSeqParams:
    """Megatron wants every token in a document. Nothing looks at padding from behind it."""
    offsets = packed.cu_seqlens_q.to(torch.int64, copy=True)
    offsets[-1] = tokens
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets)


def gated_delta_net_layer() -> ModuleSpec:
    """Norm, mixer, residual."""
    mixer = ModuleSpec(
        module=GatedDeltaNetMixer,
        submodules=GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=HeadNorm, out_proj=RowParallelLinear),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm, self_attention=mixer, self_attn_bda=get_bias_dropout_add
        ),
    )
