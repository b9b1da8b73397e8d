"""What every engine driven by Megatron's schedules shares: batches in, losses out, evaluation."""

from __future__ import annotations

import resource
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from itertools import tee
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import param_is_not_shared

from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.engine import flops
from megatron_palimpsa.engine.base import StepResult
from megatron_palimpsa.model import forward_loss
from megatron_palimpsa.parallel.cpu import cuda_means_cpu
from megatron_palimpsa.training.batch import Batch


class ScheduledEngine(ABC):
    """The part of `Engine` that does not depend on who reduces gradients and steps the optimizer."""

    _scheduler: OptimizerParamScheduler

    def __init__(self, config: StageConfig, chunks: list[HybridModel]) -> None:
        self.config = config
        self.optimizer_steps = 0
        self.chunks = chunks
        self._driven: list[torch.nn.Module] = []
        """What the schedule calls in place of each chunk."""
        self._device = next(chunks[0].parameters()).device
        self._forward_backward = get_forward_backward_func()
        self.num_parameters = _count(chunks, self._device)

    @property
    def model_flops_per_token(self) -> float:
        return flops.train_flops_per_token(self.config.model)

    def peak_memory_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    @abstractmethod
    def _gradients(self) -> float:
        """Reduce the gradients of the batch that just passed; the whole model's gradient norm."""

    @abstractmethod
    def _prepare(self) -> None:
        """Forget the gradients of the batch before."""

    @abstractmethod
    def _update(self, grad_norm: float) -> None:
        """Clip the reduced gradients and step."""

    @abstractmethod
    def _drop(self) -> None:
        """Forget the reduced gradients without a step."""

    def train_step(self, batches: Iterator[Batch], accept: Callable[[float, float], bool]) -> StepResult:
        microbatches = self.config.num_microbatches(parallel_state.get_data_parallel_world_size())
        self._prepare()
        with cuda_means_cpu():
            sums = self._run(batches, microbatches, forward_only=False)
            grad_norm = self._gradients()
        loss, tokens = self._mean_loss(sums)
        # The schedule moves first: step k is taken at the rate of k, and a dropped step still passes.
        self._scheduler.step(1)
        applied = accept(loss, grad_norm)
        if applied:
            with cuda_means_cpu():
                self._update(grad_norm)
            self.optimizer_steps += 1
        else:
            self._drop()
        return StepResult(loss=loss, grad_norm=grad_norm, applied=applied, tokens=tokens)

    def _run(self, batches: Iterator[Batch], microbatches: int, forward_only: bool) -> list[torch.Tensor]:
        """Drive Megatron's schedule; what each microbatch's loss function stored, on the last pipeline stage."""
        return self._forward_backward(
            forward_step_func=self._forward_step,
            # Each chunk takes the same microbatches in its own time.
            data_iterator=list(tee(batches, len(self._driven))),
            model=self._driven,
            num_microbatches=microbatches,
            seq_length=self.config.train.micro_batch_size * self.config.model.seq_length,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _forward_step(
        self, batches: Iterator[Batch], model: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        cp = parallel_state.get_context_parallel_group()
        batch = next(batches).of_rank(cp.rank(), cp.size()).to(self._device)
        return forward_loss(model, batch), partial(_sum_losses, batch.loss_mask)

    def _mean_loss(self, sums: list[torch.Tensor]) -> tuple[float, int]:
        """From (sum of losses, tokens) of this rank's microbatches to the mean over the global batch, everywhere."""
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        if sums:
            total += torch.stack(sums).double().sum(dim=0)
            dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        self._from_last_stage(total)
        loss_sum, tokens = total.tolist()
        return loss_sum / max(tokens, 1.0), int(tokens)

    def _from_last_stage(self, tensor: torch.Tensor) -> None:
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() > 1:
            dist.broadcast(tensor, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)

    @torch.no_grad()
    def evaluate(self, batches: list[Batch]) -> tuple[torch.Tensor, float]:
        group = parallel_state.get_data_parallel_group()
        share = -(-len(batches) // group.size())
        if len(self.chunks) > 1:
            # The interleaved schedule takes whole groups of as many microbatches as there are pipeline ranks.
            share = -(-share // self.config.parallel.pp) * self.config.parallel.pp
        # Ranks without enough batches repeat the last one; the surplus is cut off after the gather.
        mine = [batches[min(group.rank() * share + index, len(batches) - 1)] for index in range(share)]
        for chunk in self.chunks:
            chunk.eval()
        with cuda_means_cpu():
            outputs = self._run(iter(mine), share, forward_only=True)
        for chunk in self.chunks:
            chunk.train()
        tokens = mine[0].tokens.size(1) // self.config.parallel.cp
        losses = torch.empty(share, tokens, dtype=torch.float32, device=self._device)
        if outputs:
            torch.cat(outputs, out=losses)
        self._from_last_stage(losses)
        whole_rows = _gather(losses, parallel_state.get_context_parallel_group(), dim=1)
        result = _gather(whole_rows, group, dim=0)[: len(batches)].cpu()
        mask = torch.cat([batch.loss_mask for batch in batches]).cpu()
        mean = (result.double() * mask).sum() / mask.sum().clamp(min=1)
        return result, float(mean)

    def scheduler_state(self) -> dict[str, Any]:
        return {"steps": self._scheduler.num_steps}

    def load_scheduler_state(self, state: dict[str, Any]) -> None:
        # Megatron's own load_state_dict adds to the position and takes over the peak of the run that saved.
        self._scheduler.num_steps = state["steps"]
        self._scheduler.step(0)


def _count(chunks: list[HybridModel], device: torch.device) -> int:
    """Parameters of the whole model, tied and replicated ones counted once."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    count = sum(
        parameter.numel() * (tp if getattr(parameter, "tensor_model_parallel", False) else 1)
        for chunk in chunks
        for parameter in chunk.parameters()
        if param_is_not_shared(parameter)
    )
    total = torch.tensor(count, dtype=torch.int64, device=device)
    dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
    return int(total)


def _gather(tensor: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """The ranks' tensors, all of one shape, one behind the other along `dim`."""
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, dim)


def _sum_losses(
    loss_mask: torch.Tensor, losses: torch.Tensor, non_loss_data: bool = False
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Megatron's loss function: (sum to differentiate, tokens, what to report), or the losses when evaluating."""
    losses = losses.float()
    if non_loss_data:
        return losses.detach()
    total = (losses * loss_mask).sum()
    tokens = loss_mask.sum()
    return total, tokens.int(), torch.stack([total.detach(), tokens])


def check_precisions(module: torch.nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if getattr(parameter, "keep_fp32", False) and parameter.dtype != torch.float32:
            raise RuntimeError(f"{name} must stay in float32 but is {parameter.dtype} after wrapping")
