"""Megatron's schedules, data parallelism and (distributed) optimizer behind the engine interface."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core import parallel_state
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.engine import optimizer_state
from megatron_palimpsa.engine.all_at_once import clip, step_at_once
from megatron_palimpsa.engine.assembly import build_chunks, build_optimizer, build_scheduler, wrap
from megatron_palimpsa.engine.boxes import Box, ReadBox
from megatron_palimpsa.engine.grad_norm import total_grad_norm
from megatron_palimpsa.engine.scheduled import ScheduledEngine, check_precisions
from megatron_palimpsa.parallel.cpu import cuda_means_cpu


class MegatronEngine(ScheduledEngine):
    """`Engine` over Megatron-Core; needs `parallel.initialize` first."""

    def __init__(self, config: StageConfig) -> None:
        with cuda_means_cpu():
            super().__init__(config, build_chunks(config))
            self._wrapped = self._driven = wrap(self.chunks, config)
            self._optimizer = build_optimizer(self._wrapped, config)
            step_at_once(self._optimizer)
            self._scheduler = build_scheduler(self._optimizer, config)
        for chunk in self.chunks:
            check_precisions(chunk)

    @property
    def learning_rate(self) -> float:
        rate = get_canonical_lr_for_logging(self._optimizer.param_groups)
        assert rate is not None
        return rate

    def _prepare(self) -> None:
        for chunk in self._wrapped:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def _gradients(self) -> float:
        self._optimizer.prepare_grads()
        return total_grad_norm(self._optimizer, self._device)

    def _update(self, grad_norm: float) -> None:
        clip(self._optimizer, self.config.optimizer.clip_grad, grad_norm)
        self._optimizer.step_with_ready_grads()

    def _drop(self) -> None:
        pass  # `_prepare` zeroes the buffers before the next batch

    def state_share(self) -> list[tuple[Box, torch.Tensor]]:
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return optimizer_state.share(
            self._pieces(), self._locals(), replicas, spread=optimizer_state.is_spread(self._optimizer)
        )

    def load_weights(self, read: ReadBox) -> None:
        optimizer_state.load_weights(self._pieces(), self._locals(), read)

    def load_moments(self, read: ReadBox, optimizer_steps: int) -> None:
        optimizer_state.load_moments(self._pieces(), self._locals(), read, optimizer_steps)
        self.optimizer_steps = optimizer_steps

    def close(self) -> None:
        pass  # nothing outlives it

    def _pieces(self) -> Iterator[optimizer_state.Piece]:
        return optimizer_state.megatron_pieces(self._optimizer)

    def _locals(self) -> list[optimizer_state.Local]:
        return optimizer_state.locals_of(self.chunks)
