"""DeepSpeed's ZeRO stages behind the engine interface, driven by Megatron's schedules.

DeepSpeed partitions weights, gradients and moments over data parallelism, reduces gradients and steps. What Megatron
does to gradients after a batch is done here, because DeepSpeed knows of none of it: tied embeddings are summed over
their pipeline stages, copies over tensor parallelism, the sum over tokens becomes their mean, and the norm that the
gradients are clipped by counts each parameter once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.engine import optimizer_state, zero_state
from megatron_palimpsa.engine.assembly import build_chunks, build_scheduler
from megatron_palimpsa.engine.boxes import Box, ReadBox
from megatron_palimpsa.engine.deepspeed_setup import (
    Groups,
    build_adamw,
    deepspeed_config,
    import_deepspeed,
    mixed_dtypes,
)
from megatron_palimpsa.engine.scheduled import ScheduledEngine, check_precisions
from megatron_palimpsa.parallel.cpu import cuda_means_cpu

logger = logging.getLogger(__name__)


class _Driven(torch.nn.Module):
    """What Megatron's schedule takes for the model: its forward goes through DeepSpeed, all else is the model's."""

    def __init__(self, module: HybridModel, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.module = module
        self.config = module.config
        self._forward = forward

    def forward(self, *arguments: Any, **keywords: Any) -> Tensor:
        return self._forward(*arguments, **keywords)


class DeepSpeedEngine(ScheduledEngine):
    """`Engine` over DeepSpeed; needs `parallel.initialize` first."""

    def __init__(self, config: StageConfig) -> None:
        self._deepspeed = import_deepspeed()
        self._stage = config.parallel.deepspeed.zero_stage
        with cuda_means_cpu():
            super().__init__(config, build_chunks(config))
            [model] = self.chunks
            # Stage 3 leaves empty tensors in their places.
            self._locals = optimizer_state.locals_of(self.chunks)
            self._frozen = {
                id(parameter): parameter.detach().clone()
                for parameter in model.parameters()
                if not parameter.requires_grad
            }
            adamw = build_adamw(model.parameters(), config)
            self._scheduler = build_scheduler(adamw, config)
            self._adamw = adamw
            self._zero = self._start(model, adamw)
        model.config.finalize_model_grads_func = self._finalize
        self._gradients_of: list[Tensor] = []
        check_precisions(model)

    def _start(self, model: HybridModel, adamw: torch.optim.AdamW) -> Any:
        deepspeed = self._deepspeed
        # DeepSpeed keeps groups for the life of a process; those of a process group that was left are of no use.
        deepspeed.comm.comm.cdb = None
        deepspeed.utils.groups._WORLD_GROUP = None
        with mixed_dtypes(deepspeed):
            self._engine, optimizer, _, _ = deepspeed.initialize(
                model=model,
                optimizer=adamw,
                config=deepspeed_config(self.config),
                mpu=Groups(),
                dist_init_required=False,
            )
        self._driven = [_Driven(model, self._engine)]
        logger.info("DeepSpeed %s, ZeRO stage %d, steps torch's AdamW", deepspeed.__version__, self._stage)
        return optimizer

    @property
    def learning_rate(self) -> float:
        return self._adamw.param_groups[0]["lr"]

    def _prepare(self) -> None:
        self._gradients_of = []

    def _finalize(
        self, model: list[torch.nn.Module], num_tokens: Tensor, pg_collection: Any = None, **options: Any
    ) -> None:
        """In place of Megatron's `finalize_model_grads`, which takes its own DDP's buffers."""
        if self._stage == 1:
            self._sum_tied_embeddings()
            self._zero.set_gradient_accumulation_boundary(True)
            self._zero.reduce_gradients()
            self._zero.set_gradient_accumulation_boundary(False)
        else:
            self._zero.finalize_gradient_accumulation_boundary()
        self._gradients_of = zero_state.flat_gradients(self._zero, self._stage)
        self._sum_copies()
        replicas = Groups.get_data_parallel_group()
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(num_tokens, src=last, group=parallel_state.get_pipeline_model_parallel_group())
        dist.all_reduce(num_tokens, group=replicas)
        # DeepSpeed averages over data parallelism.
        scale = replicas.size() / num_tokens.clamp(min=1).item()
        torch._foreach_mul_(self._gradients_of, scale)

    def _sum_tied_embeddings(self) -> None:
        """Before the reduction over data parallelism: a stage's part of it has other elements than the other's."""
        [model] = self.chunks
        if not model.share_embeddings_and_output_weights or self.config.parallel.pp == 1:
            return
        if parallel_state.is_rank_in_embedding_group():
            weight = model.shared_embedding_or_output_weight()
            gradient = self._zero.get_gradient_for_reduction(weight)
            dist.all_reduce(gradient, group=parallel_state.get_embedding_group())

    def _sum_copies(self) -> None:
        """Gradients of parameters that tensor-parallel ranks hold whole and use in part.

        All of them cut their parameters at the same elements, so that pieces can be summed.
        """
        group = parallel_state.get_tensor_model_parallel_group()
        if group.size() == 1:
            return
        marked = [
            gradient[piece.place]
            for piece, gradient in self._pieces_and_gradients()
            if getattr(piece.parameter, "sum_gradient_over_tp", False)
            or (self.config.parallel.sequence_parallel and getattr(piece.parameter, "sequence_parallel", False))
        ]
        if marked:
            flat = _flatten_dense_tensors(marked)
            dist.all_reduce(flat, group=group)
            for gradient, summed in zip(marked, _unflatten_dense_tensors(flat, marked), strict=True):
                gradient.copy_(summed)

    def _pieces_and_gradients(self) -> list[tuple[optimizer_state.Piece, Tensor]]:
        groups = zero_state.flat_groups(self._zero, self._stage)
        return [
            (piece, gradient)
            for group, gradient in zip(groups, self._gradients_of, strict=True)
            for piece in group.pieces
        ]

    def _gradients(self) -> float:
        counted = [
            gradient[piece.place]
            for piece, gradient in self._pieces_and_gradients()
            if param_is_not_shared(piece.parameter) and param_is_not_tensor_parallel_duplicate(piece.parameter)
        ]
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        if counted:
            total = torch.stack(torch._foreach_norm(counted, dtype=torch.float64)).square().sum()
        dist.all_reduce(total)
        return float(total.sqrt().float())

    def _update(self, grad_norm: float) -> None:
        coefficient = self.config.optimizer.clip_grad / (grad_norm + 1e-6)
        if coefficient < 1.0:
            torch._foreach_mul_(self._gradients_of, coefficient)
        self._zero.step()
        self._zero.zero_grad()

    def _drop(self) -> None:
        for index in self._zero.averaged_gradients:
            self._zero.averaged_gradients[index] = None
        self._zero.zero_grad()

    def _pieces(self) -> list[optimizer_state.Piece]:
        return [piece for group in zero_state.flat_groups(self._zero, self._stage) for piece in group.pieces]

    def state_share(self) -> list[tuple[Box, Tensor]]:
        replicas = Groups.get_data_parallel_group()
        return optimizer_state.share(self._pieces(), self._locals, replicas, spread=True, frozen=self._frozen)

    @torch.no_grad()
    def load_weights(self, read: ReadBox) -> None:
        pieces = {id(piece.parameter): piece for piece in self._pieces()}
        for local in self._locals:
            piece = pieces.get(id(local.parameter))
            if piece is not None:
                piece.values("weight").copy_(optimizer_state.read_range(local, piece.start, piece.end, "weight", read))
            elif not local.parameter.requires_grad:
                kept = self._frozen[id(local.parameter)]
                kept.copy_(optimizer_state.read_range(local, 0, local.numel, "weight", read).view(kept.shape))
                with self._deepspeed.zero.GatheredParameters([local.parameter], modifier_rank=0):
                    local.parameter.copy_(kept)
        zero_state.weights_from_mains(self._zero, self._stage)

    def load_moments(self, read: ReadBox, optimizer_steps: int) -> None:
        optimizer_state.load_moments(self._pieces(), self._locals, read, optimizer_steps)
        self.optimizer_steps = optimizer_steps
