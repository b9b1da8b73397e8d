"""What the training loop and the checkpoints ask of an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.engine.boxes import Box, ReadBox
from megatron_palimpsa.training.batch import Batch


@dataclass(frozen=True)
class StepResult:
    """One training step; the same numbers on every rank."""

    loss: float
    """Mean negative log-likelihood over the `tokens` of the global batch, in nats."""
    grad_norm: float
    """L2 norm of the whole model's gradient before clipping."""
    applied: bool
    """False: the gradients were dropped, weights and moments are untouched."""
    tokens: int
    """Tokens of the global batch that carry a loss."""


class Engine(Protocol):
    """Owns the model, its gradients and its optimizer under one parallel layout.

    Every method but the properties is collective: all ranks call it, with equal arguments unless said otherwise.
    """

    config: StageConfig

    @property
    def chunks(self) -> list[torch.nn.Module]:
        """This rank's model chunks without wrappers, in model order (one unless the pipeline is interleaved)."""

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, tied and replicated ones counted once."""

    @property
    def model_flops_per_token(self) -> float:
        """FLOPs of forward and backward of the whole model, for MFU."""

    @property
    def learning_rate(self) -> float:
        """Of the latest step; after loading, of the step that was latest when saved."""

    @property
    def optimizer_steps(self) -> int:
        """Updates the moments have seen: the steps that were applied."""

    def peak_memory_bytes(self) -> int:
        """Largest memory in use on this rank since the start (device memory with CUDA, resident memory without)."""

    def train_step(self, batches: Iterator[Batch], accept: Callable[[float, float], bool]) -> StepResult:
        """Take this rank's share of a global batch through forward and backward, then update if `accept` says so.

        Args:
            batches: this data-parallel rank's microbatches; every rank of its model-parallel group reads the same.
            accept: called once with (loss, gradient norm), equal on all ranks; its answer must depend on nothing
                else that differs between ranks.
        """

    def evaluate(self, batches: list[Batch]) -> tuple[torch.Tensor, float]:
        """Losses of the same batches on every rank, shared out over data parallelism, without gradients.

        Returns:
            The negative log-likelihood of each token [len(batches), T] (CPU, float32, masked positions included),
            and its mean over the tokens that carry a loss. The same on every rank.
        """

    def state_share(self) -> list[tuple[Box, torch.Tensor]]:
        """This rank's share of the weights and of Adam's moments, for a checkpoint; local.

        Every element of the unsplit model is in the share of one rank. Keys are model names, for the moments after
        `optimizer.exp_avg.` and `optimizer.exp_avg_sq.`; values are float32 views that the next step changes.
        """

    def load_weights(self, read: ReadBox) -> None:
        """Take over the weights that `read` gives."""

    def load_moments(self, read: ReadBox, optimizer_steps: int) -> None:
        """Take over the moments that `read` gives, which have seen so many updates."""

    def close(self) -> None:
        """Give up memory that would outlive the engine, which is of no use afterwards; local."""

    def scheduler_state(self) -> dict[str, Any]:
        """Plain numbers from which `load_scheduler_state` restores the schedule's position."""

    def load_scheduler_state(self, state: dict[str, Any]) -> None:
        """Go to the saved position of this stage's own schedule, whose shape comes from the configuration."""
