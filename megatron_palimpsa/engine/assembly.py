"""What the Megatron engine drives: model chunks, data parallelism around them, optimizer and schedule."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, ParamKey, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.model import build_model
from megatron_palimpsa.parallel import finalize_model_grads

SMALLEST_BUCKET, BUCKET_A_RANK = 40_000_000, 1_000_000
"""Parameters whose gradients are reduced together: enough for the network's bandwidth, more over more ranks."""


def build_chunks(config: StageConfig) -> list[HybridModel]:
    """This pipeline rank's model chunks in model order: chunk c of rank r is stage c * pp + r."""
    chunks = []
    for chunk in range(config.parallel.vpp):
        vp_stage = chunk if config.parallel.vpp > 1 else None
        chunks.append(
            build_model(
                config,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
                vp_stage=vp_stage,
            )
        )
    return chunks


def data_parallelism(config: StageConfig) -> DistributedDataParallelConfig:
    """How gradients are reduced, in float32, and the distributed optimizer's weights gathered.

    Over more than one rank both run beside the computation: a bucket of gradients is reduced while the backward pass
    of the last microbatch goes on, and weights are gathered just ahead of the layers that need them. All chunks' at
    the same time over the pipeline where it is interleaved: its ranks wait for each other.
    """
    ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    distributed = config.parallel.distributed_optimizer
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=distributed,
        overlap_grad_reduce=ranks > 1,
        overlap_param_gather=ranks > 1 and distributed,
        align_param_gather=ranks > 1 and distributed and config.parallel.vpp > 1,
        bucket_size=max(SMALLEST_BUCKET, BUCKET_A_RANK * ranks),
    )


def wrap(chunks: list[HybridModel], config: StageConfig) -> list[DistributedDataParallel]:
    """Megatron's DDP around each chunk."""
    settings = data_parallelism(config)
    wrapped = [_wrap(chunk, settings) for chunk in chunks]
    # The schedules ask the first chunk.
    schedule = chunks[0].config
    schedule.finalize_model_grads_func = finalize_model_grads
    if settings.overlap_grad_reduce:
        # Not before the last microbatch.
        schedule.no_sync_func = [chunk.no_sync for chunk in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    if settings.align_param_gather:
        schedule.param_sync_func = [chunk.start_param_sync for chunk in wrapped]
    return wrapped


def _wrap(module: HybridModel, settings: DistributedDataParallelConfig) -> DistributedDataParallel:
    layout = None
    # As DDP decides: behind the backward pass of a later pipeline rank there is time for one reduction of all.
    in_buckets = settings.overlap_grad_reduce and parallel_state.is_pipeline_first_stage()
    if settings.use_distributed_optimizer:
        layout = DistributedOptimizer.compute_full_param_layout(
            [parameter for parameter in module.parameters() if parameter.requires_grad],
            bucket_size=settings.bucket_size if in_buckets else None,
            data_parallel_world_size=parallel_state.get_data_parallel_world_size(with_context_parallel=True),
            ddp_config=settings,
        )
    return DistributedDataParallel(module.config, settings, module, full_param_layout=layout)


def build_optimizer(chunks: list[DistributedDataParallel], config: StageConfig) -> ChainedOptimizer:
    """One AdamW over all chunks, spread over data parallelism where `parallel.distributed_optimizer` says so."""
    settings = config.optimizer
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        bf16=config.train.precision == "bf16",
        params_dtype=torch.bfloat16 if config.train.precision == "bf16" else torch.float32,
        use_distributed_optimizer=config.parallel.distributed_optimizer,
    )
    # Given overrides replace Megatron's rule for one-dimensional parameters; the model marks every exception itself.
    overrides = {ParamKey(attr="no_weight_decay"): {"wd_mult": 0.0}}
    return get_megatron_optimizer(optimizer_config, chunks, config_overrides=overrides, use_gloo_process_groups=False)


def build_scheduler(optimizer: ChainedOptimizer, config: StageConfig) -> OptimizerParamScheduler:
    """The stage's schedule, counted in steps: linear warm-up to `lr` at step `warmup_steps`, `min_lr` at the last."""
    settings = config.optimizer
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=max(config.total_steps, settings.warmup_steps + 1),
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
