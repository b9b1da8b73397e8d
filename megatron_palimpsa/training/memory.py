"""What a stage needs of a GPU's memory, from its configuration alone.

The estimate is of the largest rank at its peak, as PyTorch's allocator counts it (`torch.cuda.max_memory_allocated`):
the CUDA context, NCCL's buffers and what the allocator holds in reserve come on top.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.training.activations import Shapes, backward, formed_again, kept, output_projection, shapes_of
from megatron_palimpsa.training.parameters import layer_parameters, layers_of_rank, rank_parameters
from megatron_palimpsa.training.zero_memory import ZeroState

WORKSPACE_BYTES = 64 * 2**20
"""cuBLAS's scratch memory on Hopper."""
_TOKENS_OF_LOGITS = 4096  # of model.loss


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the rank that holds most, at the peak of a training step."""

    weights: int
    gradients: int
    """Under DeepSpeed those that are there at the peak."""
    optimizer: int
    activations: int
    """Beyond all else at the peak: in the backward pass or at the loss."""
    buffers: int = 0
    """Of DeepSpeed's ZeRO, at the peak: buckets of gradients and gathered weights."""
    host: int = 0
    """In host memory, not on the GPU."""

    @property
    def total(self) -> int:
        """On the GPU."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


def estimate_memory(config: StageConfig, data_parallel_size: int) -> MemoryEstimate:
    """The peak of a training step on GPUs with our own kernels."""
    ranks = (_of_rank(config, rank, data_parallel_size) for rank in range(config.parallel.pp))
    return max(ranks, key=lambda estimate: estimate.total)


@dataclass(frozen=True)
class _Moment:
    """Of a backward pass."""

    activations: int
    come: int
    """Parameters whose gradients it has formed."""
    first: bool
    """Whether no microbatch has passed in this step."""


def _of_rank(config: StageConfig, pipeline_rank: int, data_parallel_size: int) -> MemoryEstimate:
    shapes, parallel = shapes_of(config), config.parallel
    held = rank_parameters(config, pipeline_rank)
    moments = list(_moments(config, shapes, pipeline_rank, config.num_microbatches(data_parallel_size)))
    replicas = data_parallel_size * parallel.cp
    if parallel.engine == "deepspeed":
        return _under_zero(ZeroState(config, held, replicas, shapes.size), moments)
    # Gradients are fp32; Adam holds two fp32 moments and, of bf16 weights, an fp32 copy.
    owned = held / replicas if parallel.distributed_optimizer else held
    return MemoryEstimate(
        weights=held * shapes.size,
        gradients=held * 4,
        optimizer=round(owned * (12 if shapes.size == 2 else 8)),
        activations=max(moment.activations for moment in moments) + WORKSPACE_BYTES,
    )


def _under_zero(zero: ZeroState, moments: list[_Moment]) -> MemoryEstimate:
    """At the moment that takes most, the one behind the last pass among them: gradients come while activations go."""

    def held(gradients: int, activations: int, buffers: int) -> MemoryEstimate:
        return MemoryEstimate(
            weights=zero.weights,
            gradients=gradients,
            optimizer=zero.optimizer,
            activations=activations + WORKSPACE_BYTES,
            buffers=buffers,
            host=zero.host,
        )

    behind = held(zero.reduced_gradients, 0, zero.buffers(zero.held, first=False))
    within = (
        held(zero.gradients(at.come, at.first), at.activations, zero.buffers(at.come, at.first)) for at in moments
    )
    return max([*within, behind], key=lambda estimate: estimate.total)


def _moments(config: StageConfig, shapes: Shapes, pipeline_rank: int, microbatches: int) -> Iterator[_Moment]:
    """The peaks of the rank's forward and backward passes: of the step's first backward pass and of the later ones."""
    passes = [(_passes_in_flight(config, pipeline_rank, microbatches), True)]
    if microbatches > 1:
        passes += [(_passes_in_flight(config, pipeline_rank, microbatches - 1), False)]
    for in_flight, first in passes:
        for activations, come in _of_pass(config, shapes, pipeline_rank, in_flight):
            yield _Moment(activations, come, first)


def _of_pass(config: StageConfig, shapes: Shapes, pipeline_rank: int, in_flight: int) -> Iterator[tuple[int, int]]:
    """Bytes of activations, and parameters whose gradients have come, at the loss and within each layer."""
    model, recompute = config.model, config.train.recompute
    chunks = layers_of_rank(config, pipeline_rank)
    of_chunks = [[kept(shapes, symbol, recompute) for symbol in layers] for layers in chunks]
    # The last forward pass begins the backward one; the others in flight wait with all they keep.
    waiting = sum(map(sum, of_chunks)) * (in_flight - 1) / len(chunks) + _gathered(config, shapes)
    before = sum(of_chunks[-1])
    come = 0
    if pipeline_rank == config.parallel.pp - 1:
        yield round(waiting + before + _loss(config, shapes)), come
        come += model.hidden_size
        if model.tie_embeddings:
            # While layers go back, the embedding's gradient from the logits waits for that from the tokens.
            before += shapes.size * _vocabulary(config) * shapes.hidden
        else:
            come += _vocabulary(config) * shapes.hidden
    for symbol, own in zip(reversed(chunks[-1]), reversed(of_chunks[-1]), strict=True):
        peak = before + formed_again(shapes, symbol, recompute) + backward(shapes, symbol)
        yield round(waiting + peak), come + output_projection(shapes, symbol)
        before -= own
        come += layer_parameters(model, symbol, config.parallel.tp)


def _passes_in_flight(config: StageConfig, pipeline_rank: int, microbatches: int) -> int:
    """Forward passes of a chunk before the first backward pass ends: 1F1B, interleaved for several chunks."""
    pp, vpp = config.parallel.pp, config.parallel.vpp
    behind = pp - 1 - pipeline_rank
    if vpp == 1:
        return min(behind + 1, microbatches)
    return min(2 * behind + (vpp - 1) * pp + 1, microbatches * vpp)


def _loss(config: StageConfig, shapes: Shapes) -> int:
    """Final norm, logits and the fp32 probabilities that replace them, beside what the layers keep."""
    vocabulary, size, tokens = _vocabulary(config), shapes.size, shapes.tokens
    probabilities = 4 if size == 4 else 4 + size  # in fp32, beside the logits unless those are fp32 themselves
    each = shapes.residual_size * shapes.stream + 64
    if config.train.recompute == "none":
        # As the forward pass ends; the embedded tokens are still there.
        each += (shapes.residual_size + size) * shapes.stream
        return tokens * (each + probabilities * vocabulary)
    # In the backward pass over some tokens at a time: their logits and gradients, the gradient to all hidden states
    # and, where there are more tokens, the fp32 sum of the weight's with the part that is being added.
    some = min(tokens, _TOKENS_OF_LOGITS)
    logits = some * vocabulary * (4 if size == 4 else probabilities + size)
    weight = 0 if some == tokens else (size + 4) * vocabulary * shapes.hidden
    return tokens * (each + 2 * size * shapes.hidden) + logits + weight


def _vocabulary(config: StageConfig) -> int:
    return config.model.padded_vocab_size // config.parallel.tp


def _gathered(config: StageConfig, shapes: Shapes) -> int:
    """Megatron's buffer for what its own layers gather under sequence parallelism; it stays."""
    return shapes.tokens * shapes.size * shapes.hidden if config.parallel.sequence_parallel else 0
