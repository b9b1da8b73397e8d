"""Which module stands for each symbol of a pattern: mixers, `*` and `-`, none of them from Transformer Engine."""

from __future__ import annotations

from functools import partial

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_palimpsa.model.attention import CoreAttention
from megatron_palimpsa.model.mixer_parts import MixerOptions
from megatron_palimpsa.model.norm import RMSNorm
from megatron_palimpsa.model.stack import MixerLayer, PalimpsaStack


def hybrid_stack_spec(
    options: MixerOptions,
    recompute_cheap: bool = False,
    rope_theta: float | None = None,
    gdn_layer: ModuleSpec | type = IdentityOp,
) -> ModuleSpec:
    """Spec of a HybridModel's stack; arguments as of `PalimpsaStack` and `CoreAttention`, and what stands for `G`."""
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=ModuleSpec(module=CoreAttention, params={"rope_theta": rope_theta}),
            linear_proj=RowParallelLinear,
        ),
    )
    mlp = partial(
        MLP.as_mlp_submodule,
        submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
    )
    return ModuleSpec(
        module=PalimpsaStack,
        params={"options": options, "recompute_cheap": recompute_cheap},
        submodules=HybridStackSubmodules(
            mamba_layer=ModuleSpec(
                module=MixerLayer,
                submodules=MambaLayerSubmodules(norm=RMSNorm, mamba_bda=get_bias_dropout_add),
            ),
            attention_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=RMSNorm, self_attention=attention, self_attn_bda=get_bias_dropout_add
                ),
            ),
            gdn_layer=gdn_layer,
            mlp_layer=ModuleSpec(
                module=MLPLayer,
                submodules=TransformerLayerSubmodules(pre_mlp_layernorm=RMSNorm, mlp=mlp, mlp_bda=get_bias_dropout_add),
            ),
        ),
    )
