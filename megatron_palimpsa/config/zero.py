"""Settings of DeepSpeed's ZeRO; the names are DeepSpeed's own where it has them."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from megatron_palimpsa.config.values import STRICT, Count, NonNegative, NonNegativeFloat, Positive, PositiveFloat


@dataclass(frozen=True, config=STRICT)
class LossScaleConfig:
    """What the loss is multiplied by under `train.precision: fp16`, so that small gradients do not become 0."""

    loss_scale: NonNegativeFloat = 0.0
    """0: dynamic, halved where a gradient overflows and doubled where none has for a while."""
    initial_scale_power: Annotated[int, Field(ge=0, le=32)] = 16
    """A dynamic scale starts at 2 to this power."""
    loss_scale_window: Positive = 1000
    """Steps without overflow after which a dynamic scale is doubled."""
    hysteresis: Positive = 2
    """Overflows, since the last growth, from which on a dynamic scale is halved."""
    min_loss_scale: PositiveFloat = 1.0


@dataclass(frozen=True, config=STRICT)
class DeepSpeedConfig:
    """ZeRO: what is spread over data parallelism instead of being held whole by every rank."""

    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    """0 spreads nothing, 1 the float32 weights and moments, 2 the gradients too, 3 the weights too."""
    overlap_comm: bool = False
    """Reduce gradients beside the backward pass (stages 2 and 3)."""
    offload_optimizer: bool = False
    """Keep float32 weights, moments and reduced gradients in host memory and step there (stages 1 to 3)."""
    offload_parameters: bool = False
    """Keep this rank's part of the weights in host memory; each layer's come for its passes (stage 3)."""
    pin_memory: bool = True
    """Lock the host memory of what is offloaded, so that copies run beside the computation."""
    reduce_bucket_size: Count = 500_000_000
    """Elements of gradients reduced together; every stage holds a float32 buffer of that many on the GPU, stage 2 with
    `overlap_comm` two."""
    allgather_bucket_size: Count = 500_000_000
    """Elements of updated weights gathered together (stages 1 and 2); even."""
    sub_group_size: Count = 1_000_000_000
    """Elements stepped together (stage 3)."""
    stage3_prefetch_bucket_size: NonNegative = 50_000_000
    """Elements gathered ahead of the layer that needs them (stage 3)."""
    stage3_param_persistence_threshold: NonNegative = 100_000
    """Parameters of fewer elements stay whole on every rank (stage 3)."""
    stage3_max_live_parameters: NonNegative = 1_000_000_000
    """Elements gathered at a time, persistent ones aside (stage 3)."""
    stage3_max_reuse_distance: NonNegative = 1_000_000_000
    """A layer's weights stay gathered if they are used again within so many elements (stage 3)."""
    zero_hpz_partition_size: Positive = 1
    """ZeRO++: ranks, such as a node's, that keep a second copy of the weights among them for the backward pass."""
    gradient_accumulation_steps: Positive | None = None
    """Microbatches a step that the layout must come to; None: whatever it comes to."""
    fp16: LossScaleConfig = dataclasses.field(default_factory=LossScaleConfig)
    """Of `train.precision: fp16`."""


SAME_NAMES = (
    "overlap_comm",
    "reduce_bucket_size",
    "allgather_bucket_size",
    "sub_group_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "zero_hpz_partition_size",
)
"""Settings that DeepSpeed has under `zero_optimization` by the same name."""
