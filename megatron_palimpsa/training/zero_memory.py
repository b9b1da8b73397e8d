"""What DeepSpeed's ZeRO holds of weights, gradients and moments on a rank, counted from its source (0.19)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_palimpsa.config import DeepSpeedConfig, StageConfig


@dataclass(frozen=True)
class ZeroState:
    """Of a rank that holds `held` parameters of `size` bytes each, as `replicas` ranks do; all results are bytes."""

    config: StageConfig
    held: int
    replicas: int
    size: int

    @property
    def weights(self) -> int:
        """On the GPU."""
        return 0 if self._zero.offload_parameters else self._weights

    @property
    def optimizer(self) -> int:
        """On the GPU: float32 weights and two moments, also of a model that is in float32 itself."""
        return 0 if self._zero.offload_optimizer else 12 * self._own

    @property
    def host(self) -> int:
        """In host memory."""
        if not self._zero.offload_optimizer:
            return 0
        # Weights, moments and gradients in float32; below stage 3 the new weights on their way back too, while the
        # sum over microbatches stays on the GPU.
        each = 16 if self._stage == 3 else 16 + self.size
        return each * self._own + (self._weights if self._zero.offload_parameters else 0)

    def gradients(self, come: int, first: bool) -> int:
        """On the GPU in a backward pass, the step's first or a later one, with the gradients of `come` parameters.

        Below stage 2 each parameter's float32 sum over microbatches is made when its first gradient comes. In stage 2
        the rank's part of the sums is made in one piece, when the first bucket is full and reduced. Stage 3 makes it
        before training.
        """
        if self._stage == 3:
            return 0 if self._zero.offload_optimizer else 4 * self._own
        if self._stage < 2:
            return 4 * (come if first else self.held)
        reduced = come > self._zero.reduce_bucket_size
        # A model in float32 adds the latest microbatch's to the sum when all have come.
        pieces = int(not first) + int(reduced) if self.size == 4 else int(not first or reduced)
        return 4 * self._own * pieces

    @property
    def reduced_gradients(self) -> int:
        """On the GPU behind the last pass, when the rank's part of them is about to be stepped with."""
        if self._stage == 3:
            return self.gradients(self.held, first=False)
        if self._stage == 2:
            # In float32 they are laid end to end, which is a copy.
            return 4 * self._own * (2 if self.size == 4 else 1)
        # The part is made beside the sums.
        return 4 * self.held + 4 * self._own

    def buffers(self, come: int, first: bool) -> int:
        """Of the same pass: buckets that gradients are reduced in and, in stage 3, weights gathered for their layers.

        Below stage 3 a bucket is made for the first gradient: of each pass in stage 2, of the step in stages 0 and 1.
        """
        zero = self._zero
        bucket = 4 * zero.reduce_bucket_size
        if self._stage == 3:
            return bucket + self._gathered * self.size
        if self._stage == 2 and zero.overlap_comm:
            bucket *= 2
        there = come > 0 or (self._stage < 2 and not first)
        return (bucket if there else 0) + (self._on_its_way if zero.offload_optimizer else 0)

    @property
    def _zero(self) -> DeepSpeedConfig:
        return self.config.parallel.deepspeed

    @property
    def _stage(self) -> int:
        return self._zero.zero_stage

    @property
    def _own(self) -> int:
        """Parameters of this rank's part."""
        return self.held // (self.replicas if self._stage > 0 else 1)

    @property
    def _weights(self) -> int:
        """Wherever they lie."""
        weights = self.size * (self._own if self._stage == 3 else self.held)
        if self._zero.zero_hpz_partition_size > 1:
            weights += self.size * self.held // self._zero.zero_hpz_partition_size
        return weights

    @property
    def _on_its_way(self) -> int:
        """The largest gradient on its way to host memory, which in large models is the embedding's."""
        model = self.config.model
        return self.size * model.padded_vocab_size // self.config.parallel.tp * model.hidden_size

    @property
    def _gathered(self) -> int:
        """Elements of whole weights beside the rank's own part of them."""
        if self.replicas == 1 and not self._zero.offload_parameters:
            return 0
        return min(self.held, self._zero.stage3_max_live_parameters)
