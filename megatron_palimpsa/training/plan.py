"""What a stage will do and need, from its configuration alone: the answer to `train --dry-run`."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_palimpsa.config import ModelConfig, StageConfig
from megatron_palimpsa.engine.flops import train_flops_per_token
from megatron_palimpsa.training.console import short_count
from megatron_palimpsa.training.stages import Source

_TOKENS_PER_STATE = 64
"""About one state is kept for so many tokens of a scan, whichever implementation runs."""


def layer_parameters(model: ModelConfig, symbol: str) -> int:
    """Parameters of one layer with its norm; `symbol` is a letter of the pattern."""
    hidden, inner, heads = model.hidden_size, model.d_inner, model.nheads
    if symbol == "*":
        attention_heads = model.num_attention_heads or 1
        groups = model.num_query_groups or attention_heads
        return hidden + 2 * hidden * hidden + 2 * hidden * groups * (hidden // attention_heads)
    if symbol == "-":
        return hidden + 3 * hidden * (model.ffn_hidden_size or 0)
    convolved = inner + 2 * model.ngroups * model.d_state
    mamba = hidden + hidden * (inner + convolved + heads) + convolved * (model.d_conv + 1) + 3 * heads + inner
    mamba += inner * hidden
    if symbol == "M":
        return mamba
    return mamba + model.beta_rank * (hidden + inner) + 2 * heads


def count_parameters(model: ModelConfig) -> int:
    """Parameters of the whole model, as the built one has them."""
    embeddings = model.padded_vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    return embeddings + model.hidden_size + sum(layer_parameters(model, symbol) for symbol in model.layers)


def checkpoint_bytes(model: ModelConfig) -> int:
    """Weights and two moments in float32, and a tenth for what surrounds them."""
    return round(1.1 * 12 * count_parameters(model)) + 2**20


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the rank that holds most, while it trains."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


def estimate_memory(config: StageConfig, data_parallel_size: int) -> MemoryEstimate:
    """Weights, gradients and optimizer by their sizes; activations within about a factor of two.

    Gradients are float32. The optimizer holds two float32 moments and, in bf16, float32 weights; the distributed one
    shares them over data and context parallelism. Activations count what backward needs of every layer (only its
    input with full recomputation, and one layer in full), for as many microbatches as the pipeline keeps in flight,
    and the logits.
    """
    parallel = config.parallel
    size = 2 if config.train.precision == "bf16" else 4
    held = _largest_rank_parameters(config) / parallel.tp
    optimizer = held * (12 if size == 2 else 8)
    if parallel.distributed_optimizer:
        optimizer /= data_parallel_size * parallel.cp
    return MemoryEstimate(
        weights=round(held * size),
        gradients=round(held * 4),
        optimizer=round(optimizer),
        activations=round(_activations(config, size)),
    )


def _largest_rank_parameters(config: StageConfig) -> int:
    model = config.model
    sizes = [sum(layer_parameters(model, symbol) for symbol in layers) for layers in _layers_of_ranks(config)]
    embedding = model.padded_vocab_size * model.hidden_size
    sizes[0] += embedding
    sizes[-1] += model.hidden_size
    if config.parallel.pp > 1 or not model.tie_embeddings:
        sizes[-1] += embedding
    return max(sizes)


def _layers_of_ranks(config: StageConfig) -> list[str]:
    """The layers of each pipeline rank, those of all its chunks together."""
    pp, vpp = config.parallel.pp, config.parallel.vpp
    stages = config.model.stages(pp * vpp)
    return ["".join(stages[rank::pp]) for rank in range(pp)]


def _activations(config: StageConfig, size: int) -> float:
    model, tp = config.model, config.parallel.tp
    tokens = config.train.micro_batch_size * model.seq_length / config.parallel.cp
    residual_size = 4 if model.fp32_residual else size
    residual = model.hidden_size * (2 * residual_size + size)
    stage = max(_layers_of_ranks(config), key=len)
    inside = [_layer_bytes(model, symbol, size) / tp for symbol in stage]
    if config.train.recompute == "full":
        layers = len(stage) * model.hidden_size * residual_size + residual + max(inside)
    else:
        layers = sum(residual + values for values in inside)
    pp, vpp = config.parallel.pp, config.parallel.vpp
    # Of the first rank: 1F1B starts pp microbatches before it goes back on one; interleaved, each rank runs
    # 2 (pp - 1) + (vpp - 1) pp + 1 forward passes of one chunk first.
    in_flight = pp if vpp == 1 else (2 * (pp - 1) + (vpp - 1) * pp + 1) / vpp
    in_flight = min(in_flight, config.global_batch_size)
    logits = 2 * 4 * model.padded_vocab_size / tp
    return tokens * (layers * in_flight + residual + logits)


def _layer_bytes(model: ModelConfig, symbol: str, size: int) -> float:
    """What a token leaves for backward inside one layer, before tensor parallelism."""
    if symbol == "*":
        return 4 * size * model.hidden_size
    if symbol == "-":
        return 5 * size * (model.ffn_hidden_size or 0)
    inner, keys = model.d_inner, model.ngroups * model.d_state
    # Around the convolution three times, the values, y and the gated norm's steps, all in float32.
    mamba = 4 * (3 * (inner + 2 * keys) + 7 * inner) + size * 2 * (inner + keys)
    states = 4 * inner * model.d_state / _TOKENS_PER_STATE
    if symbol == "M":
        return mamba + states
    return mamba + 4 * inner + size * (inner + model.beta_rank) + 4 * states


def describe(config: StageConfig, world_size: int, source: Source | None, data: list[str]) -> str:
    """The resolved plan as lines of text; `data` describes the sets."""
    model, train, parallel, optimizer = config.model, config.train, config.parallel, config.optimizer
    dp = world_size // parallel.replica_size
    memory = estimate_memory(config, dp)
    parameters = count_parameters(model)
    counts = ", ".join(f"{model.layers.count(symbol)} {symbol}" for symbol in dict.fromkeys(model.layers))
    flops = train_flops_per_token(model) * train.tokens
    steps = config.total_steps
    chunks = f" in {parallel.vpp} chunks each" if parallel.vpp > 1 else ""
    lines = [
        f"stage          {config.name} -> {config.folder}",
        f"starts from    {_start(source)}",
        f"model          {parameters:,} parameters ({short_count(parameters)}), {len(model.layers)} layers ({counts}), "
        f"sequence length {model.seq_length:,}",
        f"layout         {world_size} rank{'s' if world_size > 1 else ''}: "
        f"tp {parallel.tp}, pp {parallel.pp}{chunks}, cp {parallel.cp}, dp {dp}; "
        f"{train.precision}, recompute {train.recompute}, "
        f"{'distributed' if parallel.distributed_optimizer else 'replicated'} optimizer",
        f"tokens         {train.tokens:,} in {steps:,} steps of {train.global_batch_tokens:,} "
        f"({config.global_batch_size} sequences, {config.num_microbatches(dp)} microbatches of "
        f"{train.micro_batch_size} a rank); {flops:.2e} FLOPs",
        f"schedule       lr {optimizer.lr:g}, {optimizer.warmup_steps} warm-up steps, {optimizer.schedule} to "
        f"{optimizer.lr if optimizer.schedule == 'constant' else optimizer.min_lr:g}",
        *(f"{'data' if index == 0 else '':<14} {line}" for index, line in enumerate(data)),
        f"memory a rank  about {_size(memory.total)}: weights {_size(memory.weights)}, "
        f"gradients {_size(memory.gradients)}, optimizer {_size(memory.optimizer)}, "
        f"activations {_size(memory.activations)} (these within a factor of two); "
        "PyTorch and the program come on top",
        f"checkpoints    every {config.checkpoint.interval:,} steps, {config.checkpoint.keep} kept, about "
        f"{_size(checkpoint_bytes(model))} each",
    ]
    return "\n".join(lines)


def _start(source: Source | None) -> str:
    return "random weights" if source is None else f"{source.load} of {source.checkpoint}"


def _size(count: int) -> str:
    """1500000 -> 1.5 MB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"
