"""Hugging Face's names of Mamba2's weights and ours, one line a kind of tensor.

Hugging Face (and state-spaces) keep z, x, B, C and dt in one projection and x, B and C in one convolution; here each is
a tensor of its own, so one of theirs may stand in several lines, with the rows that the line takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_palimpsa.config import ModelConfig
from megatron_palimpsa.model.naming import EMBEDDING, OUTPUT

IN_PROJ = ("z", "x", "B", "C", "dt")
CONV = ("x", "B", "C")


@dataclass(frozen=True)
class Tensors:
    """One line of the table; `{layer}` counts from 0."""

    ours: str
    theirs: str
    parts: tuple[str, ...] = ()
    """What their tensor holds one after another along its first dimension; empty: just this."""
    part: str = ""
    """Which of the parts this is."""


PER_MODEL = (
    Tensors(EMBEDDING, "backbone.embeddings.weight"),
    Tensors("decoder.final_norm.weight", "backbone.norm_f.weight"),
    Tensors(OUTPUT, "lm_head.weight"),
)
PER_LAYER = (
    Tensors("decoder.layers.{layer}.norm.weight", "backbone.layers.{layer}.norm.weight"),
    *(
        Tensors(
            f"decoder.layers.{{layer}}.mixer.{part}_weight",
            "backbone.layers.{layer}.mixer.in_proj.weight",
            IN_PROJ,
            part,
        )
        for part in IN_PROJ
    ),
    *(
        Tensors(
            f"decoder.layers.{{layer}}.mixer.conv_{part}_{kind}",
            f"backbone.layers.{{layer}}.mixer.conv1d.{kind}",
            CONV,
            part,
        )
        for part in CONV
        for kind in ("weight", "bias")
    ),
    *(
        Tensors(f"decoder.layers.{{layer}}.mixer.{name}", f"backbone.layers.{{layer}}.mixer.{name}")
        for name in ("dt_bias", "A_log", "D", "norm.weight", "out_proj.weight")
    ),
)


def part_rows(model: ModelConfig) -> dict[str, int]:
    """Rows of each part of their fused tensors."""
    state = model.ngroups * model.d_state
    return {"z": model.d_inner, "x": model.d_inner, "B": state, "C": state, "dt": model.nheads}


def lines(model: ModelConfig) -> list[Tensors]:
    """The table written out for a model: every layer's lines, and the output layer only where it is its own."""
    table = [line for line in PER_MODEL if line.ours != OUTPUT or not model.tie_embeddings]
    for layer in range(len(model.layers)):
        for line in PER_LAYER:
            table.append(Tensors(line.ours.format(layer=layer), line.theirs.format(layer=layer), line.parts, line.part))
    return table


def from_mamba2(theirs: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Their state dict -> ours, unsplit, by global names (see `naming.global_parameters`).

    Raises:
        KeyError: a tensor is missing.
        ValueError: a fused tensor does not have the rows of this geometry.
    """
    rows = part_rows(model)
    ours = {}
    for line in lines(model):
        tensor = theirs[line.theirs]
        if line.parts:
            sizes = [rows[part] for part in line.parts]
            if sum(sizes) != tensor.shape[0]:
                raise ValueError(f"{line.theirs} has {tensor.shape[0]} rows, this model's geometry needs {sum(sizes)}")
            tensor = tensor.split(sizes)[line.parts.index(line.part)]
        # Their depthwise filters are [channels, 1, width].
        ours[line.ours] = tensor.squeeze(1) if tensor.dim() == 3 else tensor
    return ours


def to_mamba2(ours: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """The inverse of `from_mamba2`."""
    pieces: dict[str, list[Tensor]] = {}
    for line in lines(model):
        tensor = ours[line.ours]
        is_filter = line.parts == CONV and tensor.dim() == 2
        pieces.setdefault(line.theirs, []).append(tensor.unsqueeze(1) if is_filter else tensor)
    return {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in pieces.items()}
