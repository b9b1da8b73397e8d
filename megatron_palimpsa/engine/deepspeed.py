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

from megatron_palimpsa import launcher
from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.engine import optimizer_state, zero_state
from megatron_palimpsa.engine.assembly import build_chunks, build_scheduler
from megatron_palimpsa.engine.boxes import Box, ReadBox
from megatron_palimpsa.engine.deepspeed_groups import Groups, SingleGroups, replicas, set_secondary_groups
from megatron_palimpsa.engine.deepspeed_setup import (
    build_adamw,
    deepspeed_config,
    import_deepspeed,
    mixed_dtypes,
)
from megatron_palimpsa.engine.loss_scale import LossScale
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
        self._offloaded = config.parallel.deepspeed.offload_optimizer
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
        self._loss_scale = LossScale(config.parallel.deepspeed.fp16) if config.train.precision == "fp16" else None
        if self._loss_scale is not None:
            model.config.grad_scale_func = self._scaled
        self._gradients_of: list[Tensor] = []
        check_precisions(model)

    def _start(self, model: HybridModel, adamw: torch.optim.AdamW) -> Any:
        deepspeed = self._deepspeed
        zero = self.config.parallel.deepspeed
        # DeepSpeed keeps groups for the life of a process; those of a process group that was left are of no use.
        deepspeed.comm.comm.cdb = None
        deepspeed.utils.groups._WORLD_GROUP = None
        self._groups = SingleGroups() if zero.zero_stage == 0 else Groups()
        self._secondary = set_secondary_groups(deepspeed, zero.zero_hpz_partition_size)
        with mixed_dtypes(deepspeed):
            self._engine, optimizer, _, _ = deepspeed.initialize(
                model=model,
                optimizer=adamw,
                config=deepspeed_config(self.config),
                mpu=self._groups,
                dist_init_required=False,
            )
        if self._stage == 3:
            zero_state.keep_persistent(optimizer)
        else:
            # Stage 2 would round each microbatch's gradients to the first group's dtype on their way into the sum.
            optimizer._gradient_reduction_buffer_dtype = lambda: torch.float32
        self._driven = [_Driven(model, self._engine)]
        steps = f"steps torch's fused AdamW on {self._place()}"
        logger.info("DeepSpeed %s, ZeRO stage %d, %s", deepspeed.__version__, self._stage, steps)
        return optimizer

    def _place(self) -> str:
        """Where the optimizer steps, after making room for it there."""
        if not self._offloaded:
            return self._device.type.upper()
        if self._device.type == "cuda":
            # A launcher leaves each rank one thread.
            torch.set_num_threads(launcher.cores())
        return f"the CPU, {torch.get_num_threads()} threads"

    @property
    def learning_rate(self) -> float:
        return self._adamw.param_groups[0]["lr"]

    def _prepare(self) -> None:
        self._gradients_of = []

    def _finalize(
        self, model: list[torch.nn.Module], num_tokens: Tensor, pg_collection: Any = None, **options: Any
    ) -> None:
        """In place of Megatron's `finalize_model_grads`, which takes its own DDP's buffers."""
        if self._stage < 2:
            self._sum_tied_embeddings()
            self._zero.set_gradient_accumulation_boundary(True)
            self._zero.reduce_gradients()
            self._zero.set_gradient_accumulation_boundary(False)
        elif self._stage == 2:
            self._zero.finalize_gradient_accumulation_boundary()
        if self._offloaded and self._device.type == "cuda":
            # Copies to host memory may still be on their way.
            torch.cuda.synchronize(self._device)
        self._gradients_of = zero_state.flat_gradients(self._zero, self._stage)
        if self._stage == 0:
            for gradient in self._gradients_of:
                dist.all_reduce(gradient, group=replicas())
        self._sum_copies()
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(num_tokens, src=last, group=parallel_state.get_pipeline_model_parallel_group())
        dist.all_reduce(num_tokens, group=replicas())
        # DeepSpeed averages over data parallelism.
        scale = (1 if self._stage == 0 else replicas().size()) / num_tokens.clamp(min=1).item()
        if self._loss_scale is not None:
            scale /= self._loss_factor()
        torch._foreach_mul_(self._gradients_of, scale)

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss * self._loss_factor()

    def _loss_factor(self) -> float:
        """What a microbatch's sum of losses is multiplied by: the scale is meant for a mean over tokens."""
        assert self._loss_scale is not None
        return self._loss_scale.scale / (self.config.train.micro_batch_size * self.config.model.seq_length)

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
            flat = _flatten_dense_tensors(marked).to(self._device)
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
            total += torch.stack(torch._foreach_norm(counted, dtype=torch.float64)).square().sum().to(self._device)
        dist.all_reduce(total)
        if self._stage == 0:
            # Every replica has counted the whole.
            total /= replicas().size()
        norm = float(total.sqrt().float())
        if self._loss_scale is not None:
            self._loss_scale.update(norm)
        return norm

    def _update(self, grad_norm: float) -> None:
        coefficient = self.config.optimizer.clip_grad / (grad_norm + 1e-6)
        if coefficient < 1.0:
            torch._foreach_mul_(self._gradients_of, coefficient)
        self._zero.step()
        self._zero.zero_grad()

    def _drop(self) -> None:
        zero_state.forget_gradients(self._zero, self._stage)

    def _pieces(self) -> list[optimizer_state.Piece]:
        return [piece for group in zero_state.flat_groups(self._zero, self._stage) for piece in group.pieces]

    def state_share(self) -> list[tuple[Box, Tensor]]:
        return optimizer_state.share(
            self._pieces(), self._locals, replicas(), spread=self._stage > 0, frozen=self._frozen
        )

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

    def scheduler_state(self) -> dict[str, Any]:
        state = super().scheduler_state()
        return state if self._loss_scale is None else {**state, "loss_scale": self._loss_scale.state_dict()}

    def load_scheduler_state(self, state: dict[str, Any]) -> None:
        super().load_scheduler_state(state)
        if self._loss_scale is not None and "loss_scale" in state:
            self._loss_scale.load_state_dict(state["loss_scale"])

    def close(self) -> None:
        self._engine.destroy()
        # The hooks of stage 3 are in lists and caches that DeepSpeed keeps for the life of the process, and hold all:
        # weights, and the layers' process groups with tens of threads of gloo's.
        for parameter in self.chunks[0].parameters():
            parameter.data = parameter.new_empty(0)
            vars(parameter).clear()
        for module in list(self.chunks[0].modules()):
            vars(module).clear()
        self._adamw.state.clear()
        self._adamw.param_groups.clear()
        vars(self._zero).clear()
        for group in (self._secondary, getattr(self._groups, "alone", None)):
            if group is not None:
                dist.destroy_process_group(group)
        vars(self).clear()
