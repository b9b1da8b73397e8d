"""What DeepSpeed's ZeRO holds of weights, gradients and moments on a rank, counted from its source (0.19).

One measurement on a GPU: stage 3 with everything offloaded, within 2 % (docs/benchmarks.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_palimpsa.config import StageConfig


@dataclass(frozen=True)
class ZeroState:
    """Bytes on a GPU, and in host memory what is offloaded."""

    weights: int
    gradients: int
    """While microbatches pass."""
    optimizer: int
    buffers: int
    """Buckets that gradients are reduced in and, in stage 3, weights gathered for the layers that need them."""
    reduced: int
    """The rank's part of the reduced gradients, where they are a copy beside all gradients behind the last pass."""
    host: int


def zero_state(config: StageConfig, held: int, replicas: int, size: int) -> ZeroState:
    """Of a rank that holds `held` parameters of `size` bytes each, as `replicas` ranks do."""
    zero = config.parallel.deepspeed
    stage = zero.zero_stage
    own = held // (replicas if stage > 0 else 1)
    weights = size * (own if stage == 3 else held)
    if zero.zero_hpz_partition_size > 1:
        weights += size * held // zero.zero_hpz_partition_size
    # Float32 weights and two moments, also of a model that is in float32 itself.
    optimizer = 12 * own
    gradients = 4 * held if stage < 2 else 4 * own
    if stage == 2 and size == 4:
        # The sum over microbatches and the latest microbatch's.
        gradients *= 2
    host = 0
    if zero.offload_optimizer:
        # Weights, moments and gradients in float32; below stage 3 the new weights on their way back too, while the
        # sum over microbatches stays on the GPU.
        host = (16 if stage == 3 else 16 + size) * own
        optimizer = 0
        gradients = 0 if stage == 3 else gradients
    if zero.offload_parameters:
        host += weights
        weights = 0
    return ZeroState(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        buffers=_buckets(config, size) + (_gathered(config, held, replicas) * size if stage == 3 else 0),
        reduced=4 * own if stage < 2 and not zero.offload_optimizer else 0,
        host=host,
    )


def _buckets(config: StageConfig, size: int) -> int:
    zero = config.parallel.deepspeed
    bucket = 4 * zero.reduce_bucket_size
    if zero.zero_stage == 2 and zero.overlap_comm:
        bucket *= 2
    if zero.zero_stage < 3 and zero.offload_optimizer:
        # The largest gradient on its way, which in large models is the embedding's.
        bucket += size * config.model.padded_vocab_size // config.parallel.tp * config.model.hidden_size
    return bucket


def _gathered(config: StageConfig, held: int, replicas: int) -> int:
    """Elements of whole weights beside the rank's own part of them."""
    zero = config.parallel.deepspeed
    if replicas == 1 and not zero.offload_parameters:
        return 0
    return min(held, zero.stage3_max_live_parameters)
