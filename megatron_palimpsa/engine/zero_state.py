"""Where DeepSpeed's ZeRO optimizers keep a rank's float32 weights, moments and reduced gradients.

Stages 1 and 2 lay the parameters of a group end to end and give each data-parallel rank one stretch; stage 3 cuts
each parameter by itself. Either way a rank has a few flat float32 tensors, and of each parameter at most one piece
in one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_palimpsa.engine.optimizer_state import Piece


@dataclass(frozen=True)
class FlatGroup:
    """One flat tensor of a rank and the pieces in it; `index` is DeepSpeed's number of the group."""

    index: int
    pieces: list[Piece]


def flat_groups(optimizer: Any, stage: int) -> list[FlatGroup]:
    """The groups of DeepSpeed's optimizer in its order, the same on all ranks that hold equal parameters."""
    return _of_stage_3(optimizer) if stage == 3 else _of_stages_1_and_2(optimizer)


def _of_stages_1_and_2(optimizer: Any) -> list[FlatGroup]:
    groups = []
    for index, parameters in enumerate(optimizer.bit16_groups):
        whole, size = optimizer.bit16_groups_flat[index], optimizer.partition_size[index]
        low = size * dist.get_rank(optimizer.real_dp_process_group[index])
        main = optimizer.single_partition_of_fp32_groups[index]
        pieces = []
        for parameter in parameters:
            # Parameters are views of the group's flat tensor.
            begin = parameter.data.storage_offset() - whole.storage_offset()
            start, end = max(low - begin, 0), min(low + size - begin, parameter.numel())
            if start < end:
                pieces.append(Piece(parameter, start, end, main, optimizer.optimizer, begin + start - low))
        groups.append(FlatGroup(index, pieces))
    return groups


def _of_stage_3(optimizer: Any) -> list[FlatGroup]:
    groups = []
    for index, parameters in enumerate(optimizer.fp16_groups):
        main = optimizer.fp32_partitioned_groups_flat[index]
        pieces = []
        for parameter in parameters:
            _, first, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = size * dist.get_rank(parameter.ds_process_group)
            end = min(start + size, parameter.ds_numel)
            if start < end:
                pieces.append(Piece(parameter, start, end, main, optimizer.optimizer, first))
        groups.append(FlatGroup(index, pieces))
    return groups


def flat_gradients(optimizer: Any, stage: int) -> list[Tensor]:
    """The reduced gradients of this rank's flat tensors, in their layout; changing one changes what is stepped with."""
    if stage == 3:
        return _gradients_of_stage_3(optimizer)
    mains = optimizer.single_partition_of_fp32_groups
    if optimizer.cpu_offload:
        return [main.grad for main in mains]
    gradients = []
    for index, main in enumerate(mains):
        parts = optimizer.averaged_gradients[index]
        flat = getattr(parts, "flat_partition", None)
        if flat is None:
            flat = torch.cat([part.reshape(-1).float() for part in parts])
            # What DeepSpeed's step lays end to end.
            optimizer.averaged_gradients[index] = [flat]
        assert flat.shape == main.shape
        gradients.append(flat)
    return gradients


def _gradients_of_stage_3(optimizer: Any) -> list[Tensor]:
    """Stretches of the buffer that gradients are added up in: its order is that of the flat tensors."""
    mains = optimizer.fp32_partitioned_groups_flat
    gradients = list(optimizer.grad_partitions_flat_buffer.split([main.numel() for main in mains]))
    for index, (main, gradient) in enumerate(zip(mains, gradients, strict=True)):
        if optimizer.offload_optimizer:
            # DeepSpeed would copy them once more, by way of the GPU.
            main.grad = gradient
        else:
            optimizer.averaged_gradients[index] = [gradient]
    return gradients


def forget_gradients(optimizer: Any, stage: int) -> None:
    """As if no batch had passed since the last step."""
    for index in optimizer.averaged_gradients:
        optimizer.averaged_gradients[index] = None
    if stage < 3 and optimizer.cpu_offload:
        optimizer.reset_cpu_buffers()
        optimizer._offload_accumulated_param_ids = set()
        # The value before the first microbatch.
        optimizer.micro_step_id = -1
    optimizer.zero_grad()


@torch.no_grad()
def weights_from_mains(optimizer: Any, stage: int) -> None:
    """Set the parameters from the float32 weights. Collective."""
    if stage < 3:
        optimizer.update_lp_params()
        return
    for index in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(index)
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
    optimizer.invalidate_secondary_tensor()


def keep_persistent(optimizer: Any) -> None:
    """Leave parameters below stage 3's threshold whole from their first use on, until they are stepped.

    DeepSpeed gives them up like the others while it learns the order of the layers, but a norm that runs again does
    so in the backward pass of the layer behind it.
    """
    for parameter in optimizer.persistent_parameters:
        # Those are left to the module that shares them, here to none.
        parameter.is_external_param = True
