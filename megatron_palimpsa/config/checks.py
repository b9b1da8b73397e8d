"""Combinations of settings that cannot run, each valid by itself."""

from __future__ import annotations

import math

from megatron_palimpsa.config.schema import LAYER_SYMBOLS, ModelConfig, ParallelConfig, StageConfig
from megatron_palimpsa.config.values import ConfigError
from megatron_palimpsa.config.zero_checks import check_engine


def check_stage(config: StageConfig, world_size: int = 1) -> None:
    """Refuse combinations that cannot run on `world_size` ranks.

    Raises:
        ConfigError: names the key, its value and what is allowed.
    """
    model, train, parallel = config.model, config.train, config.parallel
    unknown = sorted(set(model.pattern) - set(LAYER_SYMBOLS) - {"|"})
    if unknown:
        allowed = ", ".join(f"{symbol} ({meaning})" for symbol, meaning in LAYER_SYMBOLS.items())
        raise ConfigError(
            f"model.pattern={model.pattern!r}: unknown letter {unknown[0]!r}; allowed are {allowed} and |"
        )
    if not model.layers:
        raise ConfigError(f"model.pattern={model.pattern!r}: holds no layer")
    _divides("model.headdim", model.headdim, "d_inner (expand * hidden_size)", model.d_inner)
    _divides("model.ngroups", model.ngroups, "the number of heads", model.nheads)
    if model.norm_groups is not None:
        _divides("model.norm_groups", model.norm_groups, "d_inner (expand * hidden_size)", model.d_inner)
    _divides("parallel.tp", parallel.tp, "the number of heads (expand * hidden_size / headdim)", model.nheads)
    _divides("parallel.tp", parallel.tp, "the padded vocabulary", model.padded_vocab_size)
    if "G" in model.layers:
        for key, ranks in (("tp", parallel.tp), ("cp", parallel.cp)):
            if ranks > 1:
                raise ConfigError(
                    f"parallel.{key}={ranks} is not for Gated DeltaNet layers (G), which are Megatron's; set 1"
                )
    if "*" in model.layers:
        _check_attention(model, parallel.tp)
    elif model.rope_theta is not None:
        raise ConfigError(f"model.rope_theta={model.rope_theta:g} is of attention layers (*), the pattern has none")
    if "-" in model.layers:
        if model.ffn_hidden_size is None:
            raise ConfigError("model.ffn_hidden_size is missing: the pattern has MLP layers (-)")
        _divides("parallel.tp", parallel.tp, "model.ffn_hidden_size", model.ffn_hidden_size)
    _check_pipeline(model, parallel)
    _check_context(config)
    if parallel.sequence_parallel:
        if parallel.tp == 1:
            raise ConfigError("parallel.sequence_parallel=true needs parallel.tp > 1")
        tokens = train.micro_batch_size * model.seq_length // parallel.cp
        _divides("parallel.tp", parallel.tp, "a rank's tokens of a microbatch (sequence parallel)", tokens)
    check_ranks(parallel, world_size)
    data_parallel_size = world_size // parallel.replica_size
    _check_batch(config, data_parallel_size)
    check_engine(config, data_parallel_size)
    if model.dt_min >= model.dt_max:
        raise ConfigError(f"model.dt_min={model.dt_min} must be below model.dt_max={model.dt_max}")
    if model.a_min >= model.a_max:
        raise ConfigError(f"model.a_min={model.a_min} must be below model.a_max={model.a_max}")
    optimizer = config.optimizer
    if optimizer.min_lr > optimizer.lr:
        raise ConfigError(f"optimizer.min_lr={optimizer.min_lr} is above optimizer.lr={optimizer.lr}")
    if optimizer.warmup_steps >= config.total_steps and optimizer.schedule != "constant":
        raise ConfigError(
            f"optimizer.warmup_steps={optimizer.warmup_steps} leaves nothing of the stage's {config.total_steps} steps"
        )


def check_ranks(parallel: ParallelConfig, world_size: int) -> None:
    """Raises ConfigError where the layout does not divide the ranks."""
    if world_size % parallel.replica_size:
        raise ConfigError(
            f"parallel.tp={parallel.tp} * parallel.pp={parallel.pp} * parallel.cp={parallel.cp} does not divide "
            f"the number of ranks, which is {world_size}; torchrun --nproc-per-node N starts N of them"
        )


def _divides(key: str, value: int, what: str, whole: int) -> None:
    if whole % value:
        raise ConfigError(f"{key}={value} does not divide {what}, which is {whole}")


def _check_attention(model: ModelConfig, tp: int) -> None:
    if model.num_attention_heads is None:
        raise ConfigError("model.num_attention_heads is missing: the pattern has attention layers (*)")
    _divides("model.num_attention_heads", model.num_attention_heads, "model.hidden_size", model.hidden_size)
    groups = model.num_query_groups or model.num_attention_heads
    _divides("model.num_query_groups", groups, "model.num_attention_heads", model.num_attention_heads)
    _divides("parallel.tp", tp, "model.num_query_groups", groups)
    channels = model.hidden_size // model.num_attention_heads
    if model.rope_theta is not None and channels % 2:
        raise ConfigError(
            f"model.rope_theta={model.rope_theta:g} turns pairs of channels, and an attention head has {channels} "
            f"(model.hidden_size / model.num_attention_heads)"
        )


def _check_pipeline(model: ModelConfig, parallel: ParallelConfig) -> None:
    pp, vpp = parallel.pp, parallel.vpp
    if pp == 1:
        if vpp > 1:
            raise ConfigError(f"parallel.vpp={vpp} needs parallel.pp > 1: chunks take turns over pipeline ranks")
        return
    stages = model.pattern.split("|")
    key = f"parallel.pp={pp}" if vpp == 1 else f"parallel.pp={pp} * parallel.vpp={vpp}"
    if len(stages) == 1:
        if len(model.layers) % (pp * vpp):
            raise ConfigError(
                f"{key} does not divide the {len(model.layers)} layers of model.pattern={model.pattern!r}; "
                f"mark the {pp * vpp} stages with | in the pattern"
            )
    elif len(stages) != pp * vpp or not all(stages):
        raise ConfigError(
            f"model.pattern={model.pattern!r} marks {len(stages)} pipeline stages (none may be empty), "
            f"{key} needs {pp * vpp}"
        )


def _check_context(config: StageConfig) -> None:
    model, cp = config.model, config.parallel.cp
    if cp == 1:
        return
    _divides("parallel.cp", cp, "model.seq_length", model.seq_length)
    tokens = config.train.micro_batch_size * model.seq_length // cp
    if tokens < model.d_conv - 1:
        raise ConfigError(
            f"parallel.cp={cp} leaves a rank {tokens} tokens of a microbatch, fewer than the "
            f"{model.d_conv - 1} that the convolution looks back (model.d_conv={model.d_conv})"
        )


def _fitting_batch(config: StageConfig, data_parallel_size: int) -> str:
    """What to change where global_batch_tokens does not split over the ranks."""
    train, of_ranks = config.train, data_parallel_size * config.model.seq_length
    sequences, rest = divmod(train.global_batch_tokens, of_ranks)
    if not rest:
        return f"; train.micro_batch_size={math.gcd(sequences, train.micro_batch_size)} fits"
    advice = f"; with train.micro_batch_size=1 it may be {(sequences + 1) * of_ranks}"
    fewer = ", or split the ranks with parallel.tp, pp or cp" if data_parallel_size > 1 else ""
    return advice + fewer


def _check_batch(config: StageConfig, data_parallel_size: int) -> None:
    train, seq_length = config.train, config.model.seq_length
    step = train.micro_batch_size * data_parallel_size * seq_length
    if train.global_batch_tokens % step:
        raise ConfigError(
            f"train.global_batch_tokens={train.global_batch_tokens} is not a multiple of {step} "
            f"(train.micro_batch_size {train.micro_batch_size} * data-parallel size {data_parallel_size} "
            f"* model.seq_length {seq_length}){_fitting_batch(config, data_parallel_size)}"
        )
    parallel, microbatches = config.parallel, config.num_microbatches(data_parallel_size)
    if parallel.vpp > 1 and microbatches % parallel.pp:
        raise ConfigError(
            f"train.global_batch_tokens={train.global_batch_tokens} gives each rank {microbatches} microbatches; "
            f"with parallel.vpp={parallel.vpp} they must be a multiple of parallel.pp={parallel.pp}"
        )
