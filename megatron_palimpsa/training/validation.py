"""Validation: the loss, the loss by position inside the document, and what the layers' memories do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_palimpsa.engine.base import Engine
from megatron_palimpsa.model import record_memory
from megatron_palimpsa.training.batch import Batch

_FIRST_EDGE = 16


@dataclass(frozen=True)
class Validation:
    """One `valid` record without its step and tokens."""

    loss: float
    position_edges: list[int]
    loss_by_position: list[float | None]
    """Mean loss of the tokens at positions [edge_i, edge_i+1) of their document; None where no document is so long."""
    memory: dict[str, dict[str, float]]


def validate(engine: Engine, batches: list[Batch]) -> Validation:
    """Evaluate the model as it stands; a collective call, the same result on every rank."""
    losses, mean = engine.evaluate(batches)
    edges = position_edges(engine.config.model.seq_length)
    by_position = loss_by_position(losses, batches, edges)
    return Validation(mean, edges, by_position, _memory(engine, batches[0]))


def position_edges(seq_length: int) -> list[int]:
    """0, 16, 32, 64, ... seq_length."""
    edges = [0]
    edge = _FIRST_EDGE
    while edge < seq_length:
        edges.append(edge)
        edge *= 2
    return [*edges, seq_length]


def document_positions(batch: Batch) -> torch.Tensor:
    """Position of each token inside its document, [T] int64; padding counts on from the last offset."""
    starts = torch.zeros(batch.tokens.shape[1] + 1, dtype=torch.int64)
    offsets = batch.cu_seqlens.to("cpu", torch.int64)
    starts[offsets] = offsets
    return torch.arange(batch.tokens.shape[1]) - torch.cummax(starts, 0).values[:-1]


def loss_by_position(losses: torch.Tensor, batches: list[Batch], edges: list[int]) -> list[float | None]:
    """Mean of the tokens that carry a loss in each bucket [edges[i], edges[i + 1]).

    Args:
        losses: [len(batches), T] float32 on the CPU.
        edges: rising; the last one is the longest document's length.
    """
    sums = torch.zeros(len(edges) - 1, dtype=torch.float64)
    counts = torch.zeros(len(edges) - 1, dtype=torch.float64)
    for row, batch in zip(losses, batches, strict=True):
        buckets = torch.bucketize(document_positions(batch), torch.tensor(edges[1:]), right=True)
        carries = batch.loss_mask[0].cpu() > 0
        sums.index_add_(0, buckets[carries], row[carries].double())
        counts += torch.bincount(buckets[carries], minlength=len(counts))
    return [total / count if count else None for total, count in zip(sums.tolist(), counts.tolist(), strict=True)]


def _memory(engine: Engine, batch: Batch) -> dict[str, dict[str, float]]:
    """Statistics of all layers, gathered from the pipeline stages that hold them."""
    with record_memory(*engine.chunks) as recorder:
        engine.evaluate([batch])
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, recorder.result())
    layers = {number: statistics for part in gathered for number, statistics in part.items()}
    return {str(number): layers[number] for number in sorted(layers)}
