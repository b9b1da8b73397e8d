"""From a stage's configuration to Megatron's HybridModel, and from a batch to its losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from palimpsa_kernels.dispatch import check_setting
from torch import Tensor, nn

from megatron_palimpsa.config import ConfigError, ModelConfig, StageConfig
from megatron_palimpsa.model.context_parallel import PackedRow
from megatron_palimpsa.model.loss import ChunkedLossModel
from megatron_palimpsa.model.mixer_parts import MixerOptions
from megatron_palimpsa.model.spec import hybrid_stack_spec
from megatron_palimpsa.model.weights import initialize_weights
from megatron_palimpsa.parallel import cpu
from megatron_palimpsa.training.batch import Batch, RowPart

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def transformer_config(config: StageConfig) -> TransformerConfig:
    """Megatron's configuration of the model and its layout."""
    model, parallel = config.model, config.parallel
    dtype = _DTYPES[config.train.precision]
    # Megatron wants a number of attention heads even of a model without attention layers.
    attention_heads = model.num_attention_heads if "*" in model.layers else None
    recompute = {}
    if config.train.recompute == "full":
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=len(model.layers),
        hidden_size=model.hidden_size,
        num_attention_heads=attention_heads or model.nheads,
        num_query_groups=(model.num_query_groups or attention_heads) if attention_heads else model.nheads,
        kv_channels=model.hidden_size // attention_heads if attention_heads else model.headdim,
        ffn_hidden_size=model.ffn_hidden_size,
        is_hybrid_model=True,
        mamba_state_dim=model.d_state,
        mamba_head_dim=model.headdim,
        mamba_num_groups=model.ngroups,
        mamba_num_heads=model.nheads,
        linear_conv_kernel_dim=model.d_conv,
        linear_key_head_dim=model.d_state,
        linear_value_head_dim=model.headdim,
        linear_num_key_heads=model.nheads,
        linear_num_value_heads=model.nheads,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fp32_residual_connection=model.fp32_residual,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        # The residual stream is what goes from stage to stage.
        pipeline_dtype=torch.float32 if model.fp32_residual else dtype,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        # Chunks send to one rank in both directions at once, which a batch of sends and receives cannot order.
        overlap_p2p_comm=parallel.vpp > 1,
        batch_p2p_comm=parallel.vpp == 1,
        # For PyTorch before 2.0.
        batch_p2p_sync=False,
        # A stage's output is not needed once it is sent.
        deallocate_pipeline_outputs=True,
        context_parallel_size=parallel.cp,
        sequence_parallel=parallel.sequence_parallel,
        # `initialize_weights` fills what the constructors only allocate, on the CPU first.
        use_cpu_initialization=True,
        perform_initialization=False,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        cuda_graph_modules=[],
        **recompute,
    )


def mixer_options(model: ModelConfig) -> MixerOptions:
    """What Megatron's TransformerConfig has no field for."""
    return MixerOptions(
        d_conv=model.d_conv,
        norm_groups=model.norm_groups,
        beta_rank=model.beta_rank,
        train_prior=model.train_prior,
    )


def _gated_delta_net(model: ModelConfig) -> dict[str, ModuleSpec]:
    """What the stack's spec is told of `G` layers; their kernels' package is imported for them alone."""
    if "G" not in model.layers:
        return {}
    from megatron_palimpsa.model.gated_delta_net import gated_delta_net_layer, require_kernels

    require_kernels()
    return {"gdn_layer": gated_delta_net_layer()}


def build_model(
    config: StageConfig,
    *,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> HybridModel:
    """The part of the model that this rank holds, with initial weights drawn from `config.seed`.

    Args:
        config: checked with `check_stage`.
        pre_process: this pipeline stage embeds the tokens.
        post_process: this pipeline stage computes logits and losses.
        vp_stage: which of this rank's `parallel.vpp` chunks; None without interleaving.
        pg_collection: process groups; None takes parallel_state's.

    Returns:
        A HybridModel on the current CUDA device, or on the CPU without one. Parameters are in the precision of
        `config.train`, but for those marked `keep_fp32`. Its `model_config` is `config.model`.

    Raises:
        ConfigError: the environment or the pattern asks for kernels that are not there.
    """
    try:
        check_setting()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    # Tied embeddings of several pipeline stages are sent through the GPU.
    with cpu.cuda_means_cpu():
        model_class = HybridModel if config.train.recompute == "none" else ChunkedLossModel
        model = model_class(
            transformer_config(config),
            hybrid_stack_spec(
                mixer_options(config.model),
                recompute_cheap=config.train.recompute == "selective",
                rope_theta=config.model.rope_theta,
                **_gated_delta_net(config.model),
            ),
            vocab_size=config.model.padded_vocab_size,
            max_sequence_length=config.model.seq_length,
            hybrid_layer_pattern="|".join(config.model.stages(config.parallel.pp * config.parallel.vpp)),
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=config.model.tie_embeddings,
            pg_collection=groups,
            vp_stage=vp_stage,
        )
    model.model_config = config.model
    initialize_weights(model, config.model, config.seed)
    return model.cuda(torch.cuda.current_device()) if torch.cuda.is_available() else model


def packed_sequence(
    cu_seqlens: Tensor, part: RowPart | None = None, offsets: tuple[int, ...] | None = None
) -> PackedRow:
    """Megatron's description of the documents in a row, or in a context-parallel rank's part of it.

    `offsets`: `cu_seqlens` on the host, where they are known there.
    """
    return PackedRow(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, part=part, offsets=offsets)


def forward_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Run one microbatch through this rank's part of the model.

    Args:
        model: what `build_model` gives, or a wrapper around it.
        batch: on the model's device; under context parallelism this rank's part of the row (`Batch.of_rank`).

    Returns:
        On the last pipeline stage the negative log-likelihood of each label, [1, T] fp32, `loss_mask` not applied;
        on the others hidden states.
    """
    return model(
        input_ids=batch.tokens,
        position_ids=None,
        attention_mask=None,
        labels=batch.labels,
        packed_seq_params=packed_sequence(batch.cu_seqlens, batch.part, batch.offsets),
    )


def run_layers(model: HybridModel, batch: Batch) -> Tensor:
    """Run one row through a whole model, to its hidden states [T, 1, h]: the vocabulary's logits are not formed.

    Args:
        model: as `build_model` gives it, with all layers.
        batch: on its device.
    """
    packed = packed_sequence(batch.cu_seqlens, batch.part, batch.offsets)
    embedded = model.embedding(input_ids=batch.tokens, position_ids=None)
    hidden: Tensor = model.decoder(hidden_states=embedded, attention_mask=None, packed_seq_params=packed)
    return hidden
