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


@dataclass(frozen=True)
class Tensors:
    """One line of the table; `{layer}` counts from 0."""

    ours: str
    theirs: str
    shape: tuple[str, ...]
    """Of their tensor, in the names of `sizes`; what it holds one after another along its first dimension has a `+`."""
    part: str = ""
    """Which of those this is; empty: all."""

    def rows(self, size: Mapping[str, int]) -> slice:
        """The rows of their tensor that this is."""
        parts = self.shape[0].split("+")
        start = sum(size[name] for name in parts[: parts.index(self.part)]) if self.part else 0
        return slice(start, start + (size[self.part] if self.part else self.their_shape(size)[0]))

    def their_shape(self, size: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(sum(size[name] for name in dimension.split("+")) for dimension in self.shape)

    @property
    def is_filter(self) -> bool:
        """Their depthwise filters are [channels, 1, width], ours [channels, width]."""
        return len(self.shape) == 3


PER_MODEL = (
    Tensors(EMBEDDING, "backbone.embeddings.weight", ("vocabulary", "hidden")),
    Tensors("decoder.final_norm.weight", "backbone.norm_f.weight", ("hidden",)),
    Tensors(OUTPUT, "lm_head.weight", ("vocabulary", "hidden")),
)
_OURS, _THEIRS = "decoder.layers.{layer}.", "backbone.layers.{layer}."


def mixer_lines(projected: str, filtered: str, kinds: tuple[str, ...], norm: str) -> tuple[Tensors, ...]:
    """The lines of a layer with a mixer.

    Args:
        projected: what `in_proj` holds one after another, joined by `+`.
        filtered: which of those `conv1d` filters.
        kinds: of the filters' tensors: weight, bias.
        norm: the size of the norm behind the scan.
    """
    of_filters = {"weight": ("one", "width"), "bias": ()}
    return (
        Tensors(f"{_OURS}norm.weight", f"{_THEIRS}norm.weight", ("hidden",)),
        *(
            Tensors(f"{_OURS}mixer.{part}_weight", f"{_THEIRS}mixer.in_proj.weight", (projected, "hidden"), part)
            for part in projected.split("+")
        ),
        *(
            Tensors(
                f"{_OURS}mixer.conv_{part}_{kind}", f"{_THEIRS}mixer.conv1d.{kind}", (filtered, *of_filters[kind]), part
            )
            for part in filtered.split("+")
            for kind in kinds
        ),
        *(
            Tensors(f"{_OURS}mixer.{name}", f"{_THEIRS}mixer.{name}", shape)
            for name, shape in (
                ("dt_bias", ("dt",)),
                ("A_log", ("dt",)),
                ("D", ("dt",)),
                ("norm.weight", (norm,)),
                ("out_proj.weight", ("hidden", "x")),
            )
        ),
    )


PER_LAYER = mixer_lines("z+x+B+C+dt", "x+B+C", ("weight", "bias"), norm="x")


def sizes(model: ModelConfig) -> dict[str, int]:
    """What the names in the table's shapes stand for."""
    state = model.ngroups * model.d_state
    parts = {"z": model.d_inner, "x": model.d_inner, "B": state, "C": state, "dt": model.nheads}
    return parts | {
        "vocabulary": model.padded_vocab_size,
        "hidden": model.hidden_size,
        "one": 1,
        "width": model.d_conv,
    }


def lines(model: ModelConfig) -> list[Tensors]:
    """The table written out for a model: every layer's lines, and the output layer only where it is its own."""
    table = [line for line in PER_MODEL if line.ours != OUTPUT or not model.tie_embeddings]
    for layer in range(len(model.layers)):
        for line in PER_LAYER:
            table.append(Tensors(line.ours.format(layer=layer), line.theirs.format(layer=layer), line.shape, line.part))
    return table


def from_mamba2(theirs: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Their state dict -> ours, unsplit, by global names (see `naming.global_parameters`).

    Raises:
        KeyError: a tensor is missing.
        ValueError: a tensor does not have the shape of this geometry.
    """
    size = sizes(model)
    ours = {}
    for line in lines(model):
        tensor, shape = theirs[line.theirs], line.their_shape(size)
        if tensor.shape != shape:
            raise ValueError(f"{line.theirs} is {list(tensor.shape)}, this model's geometry needs {list(shape)}")
        part = tensor[line.rows(size)]
        ours[line.ours] = part.squeeze(1) if line.is_filter else part
    return ours


def to_mamba2(ours: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """The inverse of `from_mamba2`."""
    pieces: dict[str, list[Tensor]] = {}
    for line in lines(model):
        tensor = ours[line.ours]
        pieces.setdefault(line.theirs, []).append(tensor.unsqueeze(1) if line.is_filter else tensor)
    return {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in pieces.items()}
