"""Combinations of engine and ZeRO settings that cannot run."""

from __future__ import annotations

from megatron_palimpsa.config.schema import ParallelConfig, StageConfig
from megatron_palimpsa.config.values import ConfigError
from megatron_palimpsa.config.zero import DeepSpeedConfig, LossScaleConfig

_SECTION = "parallel.deepspeed"


def check_engine(config: StageConfig, data_parallel_size: int) -> None:
    """Raises ConfigError: names the key, its value and what is allowed."""
    parallel, precision = config.parallel, config.train.precision
    zero = parallel.deepspeed
    if parallel.engine == "megatron":
        if zero != DeepSpeedConfig():
            raise ConfigError(f"{_SECTION} holds settings, but parallel.engine is megatron; set it to deepspeed")
        if precision == "fp16":
            raise ConfigError(
                "train.precision=fp16 with parallel.engine=megatron, which scales no loss; set train.precision=bf16, "
                "or parallel.engine=deepspeed"
            )
        return
    _check_layout(parallel)
    _check_stage(zero)
    _check_norms(config)
    _check_sizes(zero, data_parallel_size * parallel.cp)
    if precision != "fp16" and zero.fp16 != LossScaleConfig():
        raise ConfigError(f"{_SECTION}.fp16 holds settings, but train.precision is {precision}; set it to fp16")
    steps, given = config.num_microbatches(data_parallel_size), zero.gradient_accumulation_steps
    if given not in (None, steps):
        raise ConfigError(
            f"{_SECTION}.gradient_accumulation_steps={given}, but train.global_batch_tokens="
            f"{config.train.global_batch_tokens} gives each of {data_parallel_size} data-parallel ranks {steps} "
            f"microbatches of train.micro_batch_size={config.train.micro_batch_size}; make them agree"
        )


def _check_layout(parallel: ParallelConfig) -> None:
    stage = parallel.deepspeed.zero_stage
    if parallel.vpp > 1:
        raise ConfigError(
            f"parallel.vpp={parallel.vpp} with parallel.engine=deepspeed: DeepSpeed takes one model a rank; set "
            f"parallel.vpp=1, or parallel.engine=megatron"
        )
    if parallel.pp > 1 and stage > 1:
        raise ConfigError(
            f"parallel.pp={parallel.pp} with {_SECTION}.zero_stage={stage}: gradients that are spread while a "
            f"pipeline runs make DeepSpeed fail or hang; set {_SECTION}.zero_stage=1, or parallel.pp=1"
        )


def _check_stage(zero: DeepSpeedConfig) -> None:
    """What each setting needs of the stage."""
    stage = zero.zero_stage
    if zero.overlap_comm and stage < 2:
        raise ConfigError(
            f"{_SECTION}.overlap_comm=true with {_SECTION}.zero_stage={stage}: gradients are reduced once, after the "
            f"last microbatch; set zero_stage=2 or 3, or overlap_comm=false"
        )
    if zero.offload_optimizer and stage == 0:
        raise ConfigError(
            f"{_SECTION}.offload_optimizer=true with {_SECTION}.zero_stage=0: every rank would step the whole model on "
            f"its CPU; set zero_stage=1, 2 or 3, or offload_optimizer=false"
        )
    if zero.offload_parameters and not (stage == 3 and zero.offload_optimizer):
        raise ConfigError(
            f"{_SECTION}.offload_parameters=true needs {_SECTION}.zero_stage=3 and {_SECTION}.offload_optimizer=true: "
            f"only stage 3 spreads the weights, and they are updated where they lie"
        )
    if stage < 3:
        for key in ("sub_group_size", "zero_hpz_partition_size", *_names("stage3_")):
            if getattr(zero, key) != getattr(DeepSpeedConfig(), key):
                raise ConfigError(
                    f"{_SECTION}.{key}={getattr(zero, key)} with {_SECTION}.zero_stage={stage}: it is a setting of "
                    f"stage 3; set zero_stage=3, or leave it out"
                )


def _check_norms(config: StageConfig) -> None:
    """Norms that run again do so inside the layer behind them, where stage 3 has not gathered their weights."""
    zero, model = config.parallel.deepspeed, config.model
    largest = max(model.hidden_size, model.d_inner // config.parallel.tp)
    threshold = zero.stage3_param_persistence_threshold
    if zero.zero_stage == 3 and config.train.recompute == "selective" and threshold < largest:
        raise ConfigError(
            f"{_SECTION}.stage3_param_persistence_threshold={threshold} with train.recompute=selective: norms run "
            f"again and their weights of up to {largest} elements must be whole for it; set it to {largest} or more, "
            f"or train.recompute=full"
        )


def _names(prefix: str) -> list[str]:
    return [name for name in DeepSpeedConfig.__dataclass_fields__ if name.startswith(prefix)]


def _check_sizes(zero: DeepSpeedConfig, ranks: int) -> None:
    if zero.allgather_bucket_size % 2:
        raise ConfigError(f"{_SECTION}.allgather_bucket_size={zero.allgather_bucket_size} must be even")
    size = zero.zero_hpz_partition_size
    if ranks % size:
        raise ConfigError(
            f"{_SECTION}.zero_hpz_partition_size={size} does not divide the {ranks} data-parallel ranks (context "
            f"parallelism included)"
        )
