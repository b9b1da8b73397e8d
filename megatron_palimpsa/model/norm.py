"""RMSNorm of the residual stream and the mixers' gated RMSNorms, without Transformer Engine."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from palimpsa_kernels import gated_rms_norm
from torch import Tensor, nn

from megatron_palimpsa.model.recompute import droppable
from megatron_palimpsa.model.tensor_parallel import make_parameter


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension; the output has the weight's dtype.

    Under sequence parallelism each rank normalises its own tokens, so the weight's gradient is a part of the sum over
    ranks: Megatron adds up the gradients of parameters marked `sequence_parallel`.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = make_parameter(hidden_size, dtype=config.params_dtype, weight_decay=False)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden_size], any floating dtype -> the same shape in the weight's dtype."""
        return droppable(partial(gated_rms_norm, eps=self.eps, group_size=x.shape[-1]), x, None, self.weight)


class GatedRMSNorm(nn.Module):
    """y = rms(x * silu(z)) * weight, the root mean square taken within groups of consecutive channels.

    Args:
        channels: all channels, over every tensor-parallel rank; a rank holds channels / tp consecutive ones.
        groups: divides `channels`. A group may span ranks: its sum of squares is then added up over the
            tensor-parallel group, and so is that sum's gradient.
    """

    def __init__(
        self,
        channels: int,
        groups: int,
        eps: float,
        dtype: torch.dtype,
        tp_group: torch.distributed.ProcessGroup,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.tp_group = tp_group
        self.groups = groups
        self.group_size = channels // groups
        local = channels // tp_group.size()
        first = tp_group.rank() * local
        self.weight = make_parameter(local, dtype=dtype, partition_dim=0, weight_decay=False)
        self.groups_are_local = local % self.group_size == 0
        # Consecutive local channels by the group that they belong to: (group, how many).
        self.segments: list[tuple[int, int]] = []
        channel = first
        while channel < first + local:
            group = channel // self.group_size
            end = min((group + 1) * self.group_size, first + local)
            self.segments.append((group, end - channel))
            channel = end

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """x, z [..., channels / tp] -> the same shape in the weight's dtype."""
        sizes = None if self.groups_are_local else [size for _, size in self.segments]
        norm = partial(
            gated_rms_norm,
            eps=self.eps,
            group_size=self.group_size,
            segments=sizes,
            total=None if self.groups_are_local else self._over_ranks,
        )
        return droppable(norm, x, z, self.weight)

    def _over_ranks(self, sums: Tensor) -> Tensor:
        """Sums over this rank's segments [..., segments] -> over their whole groups."""
        first, last = self.segments[0][0], self.segments[-1][0]
        of_groups = F.pad(sums, (first, self.groups - 1 - last))
        # Summed over ranks forward; every rank then uses the sum for its own channels, so the gradient is summed too.
        total = copy_to_tensor_model_parallel_region(
            reduce_from_tensor_model_parallel_region(of_groups, group=self.tp_group), group=self.tp_group
        )
        return total[..., first : last + 1]

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """For dist_checkpointing: the weight is split along its only dimension."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class HeadRMSNorm(nn.Module):
    """y = rms(x) * weight * silu(z), the root mean square taken within each head, the weight [V] shared by all heads.

    Under tensor parallelism a rank sees the weight's gradient from its own heads only.
    """

    def __init__(self, headdim: int, eps: float, dtype: torch.dtype, tp_size: int) -> None:
        super().__init__()
        self.eps = eps
        self.weight = make_parameter(headdim, dtype=dtype, sum_gradient=tp_size > 1, weight_decay=False)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """x, z [..., H * V] -> the same shape in the weight's dtype."""
        headdim = len(self.weight)
        norm = partial(gated_rms_norm, eps=self.eps, group_size=headdim)
        normed = droppable(norm, x, None, self.weight.repeat(x.shape[-1] // headdim))
        return droppable(torch.mul, normed, droppable(F.silu, z))
