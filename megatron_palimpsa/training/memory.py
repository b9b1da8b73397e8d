"""What a stage needs of a GPU's memory, from its configuration alone.

The estimate is of the largest rank at its peak, as PyTorch's allocator counts it (`torch.cuda.max_memory_allocated`): the
CUDA context, NCCL's buffers and what the allocator holds in reserve come on top.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.training.activations import Shapes, backward, kept, shapes_of
from megatron_palimpsa.training.parameters import layers_of_rank, rank_parameters

_WORKSPACE = 64 * 2**20
"""cuBLAS's scratch memory on Hopper."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the rank that holds most, at the peak of a training step."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Beyond weights, gradients and optimizer at the peak: in the backward pass, at the loss or in Adam's step."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


def estimate_memory(config: StageConfig, data_parallel_size: int) -> MemoryEstimate:
    """The peak of a training step on GPUs with our own kernels."""
    ranks = (_of_rank(config, rank, data_parallel_size) for rank in range(config.parallel.pp))
    return max(ranks, key=lambda estimate: estimate.total)


def _of_rank(config: StageConfig, pipeline_rank: int, data_parallel_size: int) -> MemoryEstimate:
    shapes, parallel = shapes_of(config), config.parallel
    held = rank_parameters(config, pipeline_rank)
    # Gradients are fp32; Adam holds two fp32 moments and, of bf16 weights, an fp32 copy.
    owned = held / (data_parallel_size * parallel.cp) if parallel.distributed_optimizer else held
    # Adam's step forms the denominators of all parameters at once.
    adam_step = 4 * owned
    return MemoryEstimate(
        weights=held * shapes.size,
        gradients=held * 4,
        optimizer=round(owned * (12 if shapes.size == 2 else 8)),
        activations=round(max(adam_step, _activations(config, shapes, pipeline_rank))) + _WORKSPACE,
    )


def _activations(config: StageConfig, shapes: Shapes, pipeline_rank: int) -> int:
    """At the peak of the rank's forward and backward passes."""
    chunks = layers_of_rank(config, pipeline_rank)
    of_chunks = [[_between(config, shapes, symbol) for symbol in layers] for layers in chunks]
    stream = shapes.tokens * shapes.residual_size * shapes.stream
    is_last = pipeline_rank == config.parallel.pp - 1
    whole = sum(sum(between) for between in of_chunks)
    # The last forward pass begins the backward one; the others in flight wait with all they keep.
    waiting = whole * (_passes_in_flight(config, pipeline_rank) - len(chunks)) / len(chunks)
    waiting += sum(sum(between) for between in of_chunks[:-1])
    before = sum(of_chunks[-1])
    peak = before + (_loss(config, shapes) if is_last else 0)
    if is_last and config.model.tie_embeddings:
        # While layers go back, the embedding's gradient from the logits waits for that from the tokens.
        before += shapes.size * config.model.padded_vocab_size * shapes.hidden // config.parallel.tp
    for symbol, between in zip(reversed(chunks[-1]), reversed(of_chunks[-1]), strict=True):
        recomputed = kept(shapes, symbol) + stream if config.train.recompute == "full" else 0
        peak = max(peak, before + recomputed + backward(shapes, symbol))
        before -= between
    return round(waiting + peak + _gathered(config, shapes))


def _between(config: StageConfig, shapes: Shapes, symbol: str) -> int:
    """What a layer holds between its forward and its backward pass."""
    if config.train.recompute == "full":
        return shapes.tokens * shapes.residual_size * shapes.stream
    return kept(shapes, symbol)


def _passes_in_flight(config: StageConfig, pipeline_rank: int) -> int:
    """Forward passes of a chunk before the first backward pass ends: 1F1B, interleaved for several chunks."""
    pp, vpp = config.parallel.pp, config.parallel.vpp
    behind = pp - 1 - pipeline_rank
    if vpp == 1:
        return min(behind + 1, config.global_batch_size)
    return min(2 * behind + (vpp - 1) * pp + 1, config.global_batch_size * vpp)


def _loss(config: StageConfig, shapes: Shapes) -> int:
    """Embedded tokens, final norm, logits and the fp32 probabilities that replace them, as the forward pass ends."""
    vocabulary = config.model.padded_vocab_size // config.parallel.tp
    logits = vocabulary * (4 if shapes.size == 4 else shapes.size + 4)
    return shapes.tokens * ((2 * shapes.residual_size + shapes.size) * shapes.stream + logits + 64)


def _gathered(config: StageConfig, shapes: Shapes) -> int:
    """Megatron's buffer for what its own layers gather under sequence parallelism; it stays."""
    return shapes.tokens * shapes.size * shapes.hidden if config.parallel.sequence_parallel else 0
