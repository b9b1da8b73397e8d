"""What a stage will do and need, from its configuration alone: the answer to `train --dry-run`."""

from __future__ import annotations

from megatron_palimpsa.config import ModelConfig, ParallelConfig, StageConfig
from megatron_palimpsa.engine.flops import train_flops_per_token
from megatron_palimpsa.training.advice import USABLE, advise, fits
from megatron_palimpsa.training.console import short_count
from megatron_palimpsa.training.memory import MemoryEstimate, estimate_memory
from megatron_palimpsa.training.parameters import count_parameters, rank_parameters
from megatron_palimpsa.training.stages import Source


def checkpoint_bytes(model: ModelConfig) -> int:
    """Weights and two moments in float32, and a tenth for what surrounds them."""
    return round(1.1 * 12 * count_parameters(model)) + 2**20


def share_bytes(config: StageConfig, data_parallel_size: int) -> int:
    """Weights and moments in float32 that the rank with most of them writes to a checkpoint."""
    held = max(rank_parameters(config, rank) for rank in range(config.parallel.pp))
    return 12 * held // (data_parallel_size * config.parallel.cp)


def describe(
    config: StageConfig, world_size: int, source: Source | None, data: list[str], gpu_memory: int | None = None
) -> str:
    """The resolved plan as lines of text; `data` describes the sets, `gpu_memory` are the bytes of one GPU if known."""
    model, train, parallel, optimizer = config.model, config.train, config.parallel, config.optimizer
    dp = world_size // parallel.replica_size
    memory = estimate_memory(config, dp)
    parameters = count_parameters(model)
    counts = ", ".join(f"{model.layers.count(symbol)} {symbol}" for symbol in dict.fromkeys(model.layers))
    flops = train_flops_per_token(model) * train.tokens
    steps = config.total_steps
    chunks = f" in {parallel.vpp} chunks each" if parallel.vpp > 1 else ""
    copy = f", from a copy of {_size(share_bytes(config, dp))} in host memory a rank"
    copy = copy if config.checkpoint.async_save else ""
    lines = [
        f"stage          {config.name} -> {config.folder}",
        f"starts from    {_start(source)}",
        f"model          {parameters:,} parameters ({short_count(parameters)}), {len(model.layers)} layers ({counts}), "
        f"sequence length {model.seq_length:,}",
        f"layout         {world_size} rank{'s' if world_size > 1 else ''}: "
        f"tp {parallel.tp}, pp {parallel.pp}{chunks}, cp {parallel.cp}, dp {dp}; "
        f"{train.precision}, recompute {train.recompute}, {_optimizer(parallel)}",
        f"tokens         {train.tokens:,} in {steps:,} steps of {train.global_batch_tokens:,} "
        f"({config.global_batch_size} sequences, {config.num_microbatches(dp)} microbatches of "
        f"{train.micro_batch_size} a rank); {flops:.2e} FLOPs",
        f"schedule       lr {optimizer.lr:g}, {optimizer.warmup_steps} warm-up steps, {optimizer.schedule} to "
        f"{optimizer.lr if optimizer.schedule == 'constant' else optimizer.min_lr:g}",
        *(f"{'data' if index == 0 else '':<14} {line}" for index, line in enumerate(data)),
        f"memory a rank  about {_size(memory.total)}: weights {_size(memory.weights)}, "
        f"gradients {_size(memory.gradients)}, optimizer {_size(memory.optimizer)}, "
        f"activations {_size(memory.activations)}{_of_zero(memory)} on a GPU at the peak; "
        f"the CUDA context {'and NCCL come' if world_size > 1 else 'comes'} on top"
        f"{_unmeasured(model, parallel)}",
        *_fit(config, world_size, memory.total, gpu_memory),
        f"checkpoints    every {config.checkpoint.interval:,} steps, {config.checkpoint.keep} kept, about "
        f"{_size(checkpoint_bytes(model))} each{copy}",
        *([] if config.evaluation is None else [f"evaluation     {config.evaluation}"]),
    ]
    return "\n".join(lines)


def _optimizer(parallel: ParallelConfig) -> str:
    if parallel.engine == "deepspeed":
        return f"DeepSpeed ZeRO stage {parallel.deepspeed.zero_stage}"
    return f"{'distributed' if parallel.distributed_optimizer else 'replicated'} optimizer"


def _of_zero(memory: MemoryEstimate) -> str:
    buffers = f", buffers {_size(memory.buffers)}" if memory.buffers else ""
    return buffers + (f", {_size(memory.host)} in host memory," if memory.host else "")


def _unmeasured(model: ModelConfig, parallel: ParallelConfig) -> str:
    """Of DeepSpeed's settings stages 1 to 3 have been measured over data parallelism, and stage 3 wholly offloaded."""
    zero = parallel.deepspeed
    spread = zero.zero_stage > 0 and zero.zero_hpz_partition_size == 1 and parallel.replica_size == 1
    measured = spread and (zero.offload_parameters or not zero.offload_optimizer)
    unmeasured = [] if parallel.engine == "megatron" or measured else ["with these settings of DeepSpeed"]
    unmeasured += ["of G layers"] if "G" in model.layers else []
    return f"; not measured {' and '.join(unmeasured)} yet" if unmeasured else ""


def _fit(config: StageConfig, world_size: int, total: int, gpu_memory: int | None) -> list[str]:
    """Whether the stage fits into a GPU, and what would make it fit."""
    if gpu_memory is None:
        return []
    if fits(total, gpu_memory):
        return [f"{'':<14} fits into a GPU of {_size(gpu_memory)}"]
    ways = advise(config, world_size, gpu_memory)
    lines = [f"does not fit into a GPU of {_size(gpu_memory)}, of which {USABLE:.0%} are usable; it would with"]
    if not ways:
        lines = [f"does not fit into a GPU of {_size(gpu_memory)}, nor with full recomputation on eight times the GPUs"]
    return [f"{'':<14} {line}" for line in [*lines, *(f"  {way}" for way in ways)]]


def _start(source: Source | None) -> str:
    return "random weights" if source is None else f"{source.load} of {source.checkpoint}"


def _size(count: int) -> str:
    """1500000 -> 1.5 MB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"
