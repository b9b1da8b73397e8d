"""Gradients of parameters that every tensor-parallel rank holds whole but uses in part."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads as megatron_finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


def finalize_model_grads(
    model: list[torch.nn.Module],
    num_tokens: torch.Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool | None = False,
) -> None:
    """Megatron's `finalize_model_grads`, then the sum over TP of parameters marked `sum_gradient_over_tp`.

    Megatron reduces over data parallelism, ties embeddings over pipeline stages and divides by the number of tokens.
    All of that is linear, so the sum over TP may follow, and it has to where the reduction overlaps the backward
    pass: a bucket that is under way must not change. With the distributed optimizer only the part of `main_grad`
    that this data-parallel rank owns is reduced, and it is the same part on all ranks of a TP group.

    Args:
        model: Megatron DDP modules of this pipeline stage.
        num_tokens: tokens with a loss on this rank (a scalar tensor, summed in place over data parallelism).
    """
    megatron_finalize_model_grads(model, num_tokens, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
    group = pg_collection.tp if pg_collection is not None else parallel_state.get_tensor_model_parallel_group()
    sum_marked_gradients(model, group)


def sum_marked_gradients(model: list[torch.nn.Module], group: dist.ProcessGroup) -> None:
    """Sum `main_grad` of the parameters marked `sum_gradient_over_tp` over the ranks of a TP group, in place.

    Raises:
        ValueError: a parameter carries Megatron's `sequence_parallel` mark too and would be summed twice.
    """
    if group.size() == 1:
        return
    gradients: dict[torch.dtype, list[torch.Tensor]] = {}
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            if not parameter.requires_grad or not getattr(parameter, "sum_gradient_over_tp", False):
                continue
            if getattr(parameter, "sequence_parallel", False):
                raise ValueError(f"{name}: marked both sum_gradient_over_tp and sequence_parallel")
            gradient = parameter.main_grad  # type: ignore[attr-defined]
            gradients.setdefault(gradient.dtype, []).append(gradient)
    for same_dtype in gradients.values():
        flat = _flatten_dense_tensors(same_dtype)
        dist.all_reduce(flat, group=group)
        for gradient, summed in zip(same_dtype, _unflatten_dense_tensors(flat, same_dtype), strict=True):
            gradient.copy_(summed)
