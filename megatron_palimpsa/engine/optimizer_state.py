"""Weights and Adam moments of Megatron's optimizers as parts of the unsplit model's tensors.

Megatron's three optimizers keep float32 weights and moments in different places: beside each parameter (fp32), in
float32 copies (bf16), or in flat pieces spread over data parallelism (distributed). Here every element of the model
has one float32 weight and two moments, whatever the optimizer, and belongs to one rank, so that one checkpoint format
serves all and no rank gathers what others hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_palimpsa.engine.boxes import Box, ReadBox, Shape, boxes_of_range

MOMENTS = ("exp_avg", "exp_avg_sq")
PREFIXES = {"weight": "", **{moment: f"optimizer.{moment}." for moment in MOMENTS}}
"""Kind of state -> what its key has before the parameter's name."""

MOST_ELEMENTS = 2**24
"""Of a box: what is copied, written and read at once stays at 64 MiB, however large a tensor is."""


@dataclass(frozen=True)
class Piece:
    """The part of a parameter that this rank's optimizer updates."""

    parameter: torch.nn.Parameter
    start: int
    end: int
    main: Tensor
    """What the optimizer steps, in float32: the piece itself, or a flat tensor of several parameters' pieces."""
    optimizer: torch.optim.Optimizer
    first: int = 0
    """Where the piece begins in `main`."""

    @property
    def place(self) -> slice:
        """The piece's elements in `main`, laid flat."""
        return slice(self.first, self.first + self.end - self.start)

    def values(self, kind: str) -> Tensor:
        """The weights or one of the moments [end - start], on the optimizer's device; zero before any update."""
        if kind == "weight":
            return self.main.detach().reshape(-1)[self.place]
        state = self.optimizer.state.get(self.main, {})
        if kind in state:
            return state[kind].reshape(-1)[self.place]
        return torch.zeros((), dtype=torch.float32, device=self.main.device).expand(self.end - self.start)


def megatron_pieces(optimizer: ChainedOptimizer) -> Iterator[Piece]:
    """The pieces of Megatron's optimizers."""
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
                yield Piece(parameter, owned.start, owned.end, main, part.optimizer)
        else:
            copies = [id(copy) for group in getattr(part, "fp32_from_float16_groups", ()) for copy in group]
            originals = [original for group in getattr(part, "float16_groups", ()) for original in group]
            original_of = dict(zip(copies, originals, strict=True))
            for main in part.get_parameters():
                parameter = original_of.get(id(main), main)
                yield Piece(parameter, 0, parameter.numel(), main, part.optimizer)


def is_spread(optimizer: ChainedOptimizer) -> bool:
    """Whether Megatron's optimizer holds each element on one data-parallel rank only."""
    return any(isinstance(part, DistributedOptimizer) for part in optimizer.chained_optimizers)


@dataclass(frozen=True)
class _Part:
    """Successive elements of a parameter that are a box of an unsplit tensor."""

    start: int
    numel: int
    key: str
    local_shape: Shape
    global_shape: Shape
    global_offset: Shape


@dataclass(frozen=True)
class Local:
    """A parameter of this rank and where its elements lie in the unsplit model."""

    parameter: torch.nn.Parameter
    numel: int
    parts: list[_Part]
    """One, or several where parts of the parameter are split by themselves."""
    is_main: bool
    """Whether no other rank but for data parallelism holds the same elements (copies over TP, tied embeddings)."""

    def boxes(self, start: int, end: int, prefix: str) -> Iterator[tuple[Box, slice]]:
        """The elements `start` to `end` of the parameter in the unsplit model, and where each box's are among them."""
        for part in self.parts:
            low, high = max(start, part.start), min(end, part.start + part.numel)
            for first in range(low, high, MOST_ELEMENTS):
                last = min(first + MOST_ELEMENTS, high)
                for offset, shape in boxes_of_range(part.local_shape, first - part.start, last - part.start):
                    place = tuple(map(sum, zip(part.global_offset, offset, strict=True)))
                    box = Box(prefix + part.key, part.global_shape, place, shape)
                    yield box, slice(first - start, first - start + box.numel)
                    first += box.numel


@torch.no_grad()
def locals_of(modules: Iterable[torch.nn.Module]) -> list[Local]:
    """All parameters, while they are whole; extra states of Megatron's layers are left out (empty without fp8)."""
    found = []
    for module in modules:
        sharded_state_dict: Callable[[], dict[str, Any]] = module.sharded_state_dict  # type: ignore[assignment]
        for shard in sharded_state_dict().values():
            if isinstance(shard, ShardedObject):
                continue
            parameter = shard.data
            sharded: list[ShardedTensor] = shard.build() if isinstance(shard, ShardedTensorFactory) else [shard]
            assert all(part.data.is_contiguous() and not part.prepend_axis_num for part in sharded), shard.key
            parts = [
                _Part(
                    part.data.storage_offset() - parameter.storage_offset(),
                    part.data.numel(),
                    part.key,
                    tuple(part.local_shape),
                    tuple(part.global_shape),
                    tuple(part.global_offset),
                )
                for part in sharded
            ]
            found.append(Local(parameter, parameter.numel(), parts, not any(sharded[0].replica_id[:-1])))
    return found


@torch.no_grad()
def share(
    pieces: Iterable[Piece],
    parameters: Iterable[Local],
    replicas: dist.ProcessGroup,
    spread: bool,
    frozen: Mapping[int, Tensor] = MappingProxyType({}),
) -> list[tuple[Box, Tensor]]:
    """This rank's share of all weights and moments: every element of the model is in one rank's share.

    A distributed optimizer's pieces go to the ranks that have them. What is on all ranks of `replicas` is laid end to
    end and cut into as many equal stretches. Nothing is communicated.

    Args:
        parameters: of this rank's chunks of the model.
        replicas: the ranks that hold the same parameters (data and context parallelism).
        spread: each element has its piece on one rank of `replicas`, not on all.
        frozen: by id, whole values of parameters that are not trained, where the parameters do not hold them.

    Returns:
        Boxes and their float32 values, views of what the next step changes.
    """
    piece_of = {id(piece.parameter): piece for piece in pieces}
    mains = [local for local in parameters if local.is_main]
    copied = [local for local in mains if not (spread and local.parameter.requires_grad)]
    total = sum(local.numel for local in copied)
    low, high = (total * (replicas.rank() + offset) // replicas.size() for offset in (0, 1))
    result: list[tuple[Box, Tensor]] = []
    before = 0
    for local in copied:
        key, size = id(local.parameter), local.numel
        whole = frozen.get(key, local.parameter)
        result += _values(local, whole, piece_of.get(key), max(low - before, 0), min(high - before, size))
        before += size
    if spread:
        for local in mains:
            piece = piece_of.get(id(local.parameter))
            if piece is not None:
                result += _values(local, local.parameter, piece, piece.start, piece.end)
    return result


def _values(local: Local, whole: Tensor, piece: Piece | None, start: int, end: int) -> Iterator[tuple[Box, Tensor]]:
    # Frozen parameters have no piece, and weights only.
    for kind in PREFIXES if piece is not None else ("weight",):
        values = whole.detach().float().reshape(-1) if piece is None else piece.values(kind)
        skipped = start - (0 if piece is None else piece.start)
        for box, place in local.boxes(start, end, PREFIXES[kind]):
            yield box, values[skipped + place.start : skipped + place.stop].reshape(box.shape)


@torch.no_grad()
def load_weights(pieces: Iterable[Piece], parameters: Iterable[Local], read: ReadBox) -> None:
    """Set the model's parameters and the optimizer's float32 weights; one parameter at a time is in host memory."""
    piece_of = {id(piece.parameter): piece for piece in pieces}
    for local in parameters:
        parameter = local.parameter
        weight = read_range(local, 0, local.numel, "weight", read)
        parameter.copy_(weight.view(parameter.shape))
        piece = piece_of.get(id(parameter))
        if piece is not None:
            piece.values("weight").copy_(weight[piece.start : piece.end])


@torch.no_grad()
def load_moments(pieces: Iterable[Piece], parameters: Iterable[Local], read: ReadBox, steps: int) -> None:
    """Set the moments of this rank's pieces, and Adam's step count; 0 steps empties the state, as in a fresh one."""
    pieces = list(pieces)
    local_of = {id(local.parameter): local for local in parameters}
    for piece in pieces:
        piece.optimizer.state.pop(piece.main, None)
    if steps == 0:
        return
    for piece in pieces:
        if piece.main not in piece.optimizer.state:
            # A step tensor of its own for each: AdamW counts it up in place, once a tensor that it steps.
            moments = {moment: torch.zeros_like(piece.main, dtype=torch.float32) for moment in MOMENTS}
            # Where AdamW counts: a fused one beside the moments.
            device = piece.main.device if piece.optimizer.defaults.get("fused") else "cpu"
            piece.optimizer.state[piece.main] = {"step": torch.tensor(float(steps), device=device), **moments}
        for moment in MOMENTS:
            values = read_range(local_of[id(piece.parameter)], piece.start, piece.end, moment, read)
            piece.values(moment).copy_(values)


def read_range(local: Local, start: int, end: int, kind: str, read: ReadBox) -> Tensor:
    """The stored elements `start` to `end` of a parameter: weights or a moment, [end - start] float32 on the CPU."""
    values = torch.empty(end - start, dtype=torch.float32)
    for box, place in local.boxes(start, end, PREFIXES[kind]):
        read(box, values[place].view(box.shape))
    return values
