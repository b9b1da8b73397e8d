"""Tensors of a published model through a table of names: checked as a whole, then read some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.convert.checks import require_tensors
from megatron_palimpsa.convert.sources import Stored
from megatron_palimpsa.convert.stage_folder import stretches
from megatron_palimpsa.engine.boxes import Box
from megatron_palimpsa.model.mamba2_names import Tensors
from megatron_palimpsa.model.naming import OUTPUT

HEAD, EMBEDDINGS = "lm_head.weight", "backbone.embeddings.weight"


def check_tensors(
    tensors: Mapping[str, Stored], table: Sequence[Tensors], size: Mapping[str, int], source: str
) -> None:
    """Refuse a model whose tensors are not those of the table.

    Args:
        size: what the names in their shapes stand for, in the source.

    Raises:
        ConfigError: a tensor is missing, unknown or of another shape, or an output layer that the table leaves out is
            not the embedding.
    """
    wanted = {line.theirs: line.their_shape(size) for line in table}
    tied = all(line.ours != OUTPUT for line in table)
    # Tied, it may be written out all the same.
    allowed = {**wanted, HEAD: wanted[EMBEDDINGS]} if tied else wanted
    found = {name: stored.shape for name, stored in tensors.items()}
    require_tensors(found, wanted, allowed, f"{source}: not the tensors of its config.json")
    if tied and HEAD in tensors:
        rows, width = wanted[EMBEDDINGS]
        for part in stretches(slice(0, rows), width):
            if not torch.equal(tensors[HEAD].rows(part), tensors[EMBEDDINGS].rows(part)):
                raise ConfigError(f"{source}: {HEAD} is not {EMBEDDINGS}, to which config.json ties it")


def boxes(
    tensors: Mapping[str, Stored], table: Sequence[Tensors], ours: Mapping[str, int], theirs: Mapping[str, int]
) -> Iterator[tuple[Box, Tensor]]:
    """All of our tensors in float32; vocabulary rows that theirs lack are zero.

    Args:
        ours, theirs: what the names in the table's shapes stand for here and in the source.
    """
    for line in table:
        taken = line.rows(theirs)
        rows, width = line.rows(ours), [ours[name] for name in line.shape[1:] if name != "one"]
        whole = (rows.stop - rows.start, *width)
        for part in stretches(taken, *width):
            value = tensors[line.theirs].rows(part).float().reshape(part.stop - part.start, *width)
            if part.stop == taken.stop and rows.stop > taken.stop:
                value = F.pad(value, (0, 0, 0, rows.stop - taken.stop))
            yield Box(line.ours, whole, (part.start - taken.start, *[0] * len(width)), tuple(value.shape)), value
