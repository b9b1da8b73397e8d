"""Parameters of our own modules under tensor parallelism: how one is marked, and which part of it a rank holds."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def make_parameter(
    *shape: int,
    dtype: torch.dtype,
    partition_dim: int | None = None,
    sum_gradient: bool = False,
    keep_fp32: bool = False,
    weight_decay: bool = True,
    trainable: bool = True,
) -> nn.Parameter:
    """An uninitialised parameter with the marks that Megatron, our optimizer groups and our checkpoints read.

    Args:
        shape: this rank's share.
        partition_dim: the dimension split over tensor-parallel ranks; None for a parameter that all of them hold.
        sum_gradient: every rank holds the whole parameter and sees a part of its gradient only
            (`sum_gradient_over_tp`).
        keep_fp32: fp32 whatever `dtype` says, and left alone by every wrapper.
    """
    parameter = nn.Parameter(torch.empty(shape, dtype=torch.float32 if keep_fp32 else dtype), requires_grad=trainable)
    marks: dict[str, object] = {
        "tensor_model_parallel": partition_dim is not None,
        "partition_dim": -1 if partition_dim is None else partition_dim,
        "partition_stride": 1,
    }
    if sum_gradient:
        marks["sum_gradient_over_tp"] = True
    if keep_fp32:
        marks["keep_fp32"] = True
    if not weight_decay:
        marks["no_weight_decay"] = True
    for name, value in marks.items():
        setattr(parameter, name, value)
    return parameter


def is_split(parameter: Tensor) -> bool:
    """Whether tensor-parallel ranks hold different parts of it."""
    return getattr(parameter, "tensor_model_parallel", False)


def _partition(parameter: Tensor) -> tuple[int, int]:
    marks = vars(parameter)
    return marks["partition_dim"], marks["partition_stride"]


def full_shape(parameter: Tensor, tp_size: int) -> list[int]:
    """Shape of the unsplit parameter of which `parameter` is a rank's share."""
    shape = list(parameter.shape)
    if is_split(parameter):
        shape[_partition(parameter)[0]] *= tp_size
    return shape


def local_share(full: Tensor, parameter: Tensor, tp_rank: int, tp_size: int) -> Tensor:
    """The share of the unsplit `full` that rank `tp_rank` of `tp_size` holds as `parameter`.

    A stride of s means that s tensors lie one after another along the split dimension and each is split by itself
    (gate and up projection of a gated MLP).
    """
    if not is_split(parameter):
        return full
    dim, stride = _partition(parameter)
    return torch.cat(full.chunk(tp_size * stride, dim)[tp_rank::tp_size], dim)
