"""Weights and Adam moments of Megatron's optimizers in the shape of the model's parameters.

Megatron's three optimizers keep float32 weights and moments in different places: beside each parameter (fp32), in
float32 copies (bf16), or in flat pieces spread over data parallelism (distributed). Here each parameter has one
float32 weight and two moments of its own shape, whatever the optimizer, so that one checkpoint format serves all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Piece:
    """The part of a parameter that this rank's optimizer updates."""

    parameter: torch.nn.Parameter
    start: int
    end: int
    main: torch.Tensor
    """The float32 weights that the optimizer steps; [end - start], or the parameter's shape."""
    optimizer: torch.optim.Optimizer


def _pieces(optimizer: ChainedOptimizer) -> Iterator[_Piece]:
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        if isinstance(part, DistributedOptimizer):
            # Not by model_param_group_index_map: where a group mixes bf16 and fp32 parameters, as with those kept in
            # fp32, its order is not that of the optimizer's groups.
            models = chain(*part.model_float16_groups, *part.model_fp32_groups)
            mains = chain(*part.shard_fp32_from_float16_groups, *part.shard_fp32_groups)
            for parameter, main in zip(models, mains, strict=True):
                owned = part._get_model_param_range_map(parameter)["param"]
                yield _Piece(parameter, owned.start, owned.end, main, part.optimizer)
        else:
            copies = [id(copy) for group in getattr(part, "fp32_from_float16_groups", ()) for copy in group]
            originals = [original for group in getattr(part, "float16_groups", ()) for original in group]
            original_of = dict(zip(copies, originals, strict=True))
            for main in part.get_parameters():
                parameter = original_of.get(id(main), main)
                yield _Piece(parameter, 0, parameter.numel(), main, part.optimizer)


def read(
    optimizer: ChainedOptimizer,
    parameters: list[torch.nn.Parameter],
    name: str,
    data_parallel_group: dist.ProcessGroup,
) -> list[torch.Tensor]:
    """The float32 weights (`name="weight"`) or one of the `MOMENTS` of each parameter, in the parameter's shape.

    Collective over the data-parallel group where a distributed optimizer spreads its pieces over it; only the
    group's first rank, which writes checkpoints, then gets the values (on the CPU), the others get zeros that take
    no memory. Moments of parameters that were never updated are zero; frozen parameters have weights only.
    """
    pieces = {id(piece.parameter): piece for piece in _pieces(optimizer)}
    spread = data_parallel_group.size() > 1 and any(
        isinstance(part, DistributedOptimizer) for part in optimizer.chained_optimizers
    )
    values = []
    for parameter in parameters:
        piece = pieces.get(id(parameter))
        if not parameter.requires_grad:
            values.append(parameter.detach().float())
        elif spread:
            values.append(_gather(parameter, piece, name, data_parallel_group))
        else:
            assert piece is not None
            values.append(_value(piece, name).view(parameter.shape))
    return values


def _value(piece: _Piece, name: str) -> torch.Tensor:
    if name == "weight":
        return piece.main.detach()
    state = piece.optimizer.state.get(piece.main, {})
    return state[name] if name in state else torch.zeros_like(piece.main)


def _gather(parameter: torch.nn.Parameter, piece: _Piece | None, name: str, group: dist.ProcessGroup) -> torch.Tensor:
    # Ranks that do not own an element add zero to it: exact, wherever the pieces' borders are.
    flat = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    if piece is not None:
        flat[piece.start : piece.end] = _value(piece, name).view(-1)
    dist.all_reduce(flat, group=group)
    if group.rank() > 0:
        return torch.zeros(()).expand(parameter.shape)
    return flat.view(parameter.shape).cpu()


@torch.no_grad()
def write_weights(
    optimizer: ChainedOptimizer, parameters: list[torch.nn.Parameter], weights: list[torch.Tensor]
) -> None:
    """Set the model's parameters and the optimizer's float32 weights, each from a tensor of the parameter's shape."""
    weight_of = {}
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.copy_(weight)
        weight_of[id(parameter)] = weight
    for piece in _pieces(optimizer):
        weight = weight_of[id(piece.parameter)].reshape(-1)[piece.start : piece.end]
        piece.main.copy_(weight.view(piece.main.shape))


@torch.no_grad()
def write_moments(
    optimizer: ChainedOptimizer,
    parameters: list[torch.nn.Parameter],
    moments: dict[str, list[torch.Tensor]],
    steps: int,
) -> None:
    """Set Adam's moments and step count; 0 steps empties the state, as in a fresh optimizer."""
    index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
    for piece in _pieces(optimizer):
        piece.optimizer.state.pop(piece.main, None)
        if steps == 0:
            continue
        # A step tensor of its own for each parameter: AdamW counts it up in place, once a parameter.
        state = {"step": torch.tensor(float(steps), dtype=torch.float32)}
        for name in MOMENTS:
            full = moments[name][index_of[id(piece.parameter)]]
            owned = full.reshape(-1)[piece.start : piece.end].view(piece.main.shape)
            state[name] = owned.to(device=piece.main.device, dtype=torch.float32, copy=True)
        piece.optimizer.state[piece.main] = state
