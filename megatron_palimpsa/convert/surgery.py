"""`convert palimpsa` and `convert without-importance`: M and L layers of a stage into P and Q layers, and back.

What a layer has with and without importance is carried over bit for bit, with Adam's moments where the stage was
trained. Everything is checked before anything is written, the new stage's logits before it gets its name. Tensors go
through memory some rows at a time, the models that are compared layer by layer.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_palimpsa import parallel
from megatron_palimpsa.config import ConfigError, ModelConfig, ParallelConfig
from megatron_palimpsa.convert.checks import require_tensors
from megatron_palimpsa.convert.difference import Side, compare
from megatron_palimpsa.convert.document import read_document
from megatron_palimpsa.convert.layers import WITH_IMPORTANCE, Turn, changed
from megatron_palimpsa.convert.layerwise import LayerByLayer, Parameter
from megatron_palimpsa.convert.stage_folder import (
    complete,
    new_stage,
    require_new,
    stretches,
    untrained_stage,
    write_checkpoint,
)
from megatron_palimpsa.convert.trained import find_trained, require_intact
from megatron_palimpsa.engine.boxes import Box, Shape
from megatron_palimpsa.engine.optimizer_state import PREFIXES
from megatron_palimpsa.model.weights import drawn
from megatron_palimpsa.training.checkpoint_format import Reader
from megatron_palimpsa.training.checkpoint_random import RANDOM_STATES

REPORT = "conversion.json"
IMPORTANCE = ("beta_down_weight", "beta_up_weight", "b_scale", "prior_log")
"""What the mixers of P and Q layers have and those of M and L have not: nothing else may be new, or go."""


def turn_layers(
    source: Path, output: Path, turn: Turn, seed: int | None = None, text: Path | None = None
) -> dict[str, Any]:
    """Write the stage `source` with other layers as the complete stage `output`.

    Args:
        source: a complete stage's folder, or a checkpoint of a stage.
        seed: that new parameters are drawn from, as a model is that starts with it; None: that of `source`.
        text: a file whose beginning both models are run over; None: see `read_document`.

    Returns:
        The report, which is also `output/conversion.json`.

    Raises:
        ConfigError: the stage is incomplete or damaged, the layers cannot be turned, `output` is there already, or the
            layers' kernels differ by more than rounding where they should not.
        OSError: it cannot be written.
    """
    require_new(output)
    there = find_trained(source)
    before, after = there.config.model, turn.of(there.config.model)
    settings = dataclasses.asdict(after)
    seed = there.config.seed if seed is None else seed
    precision: Literal["bf16", "fp32"] = "fp32" if there.config.train.precision == "fp32" else "bf16"
    stage = untrained_stage(settings, output, there.tokenizer, f"{source} -> {output}", seed, precision)
    tokens, sample = read_document(text, there.tokenizer, after.vocab_size)
    require_intact(there.checkpoint)
    kinds = tuple(PREFIXES) if there.optimizer_steps else ("weight",)
    step = there.step if there.optimizer_steps else 0
    parallel.initialize(ParallelConfig(), seed)
    try:
        layers = LayerByLayer(stage, before.layers + after.layers)
        old, new = layers.parameters(before), layers.parameters(after)
        _check_changes(old, new, changed(before, after))
        reader = Reader(there.checkpoint)
        _check_tensors(reader, old, kinds, there.checkpoint)
        keys = _keys(new, kinds)
        elements = sum(math.prod(shape) for *_, shape in keys)
        with new_stage(output) as run:
            values = _boxes(reader, keys, old, after, seed)
            write_checkpoint(run, after, values, elements=elements, step=step, optimizer_steps=there.optimizer_steps)
            sides = Side(before.layers, reader), Side(after.layers, Reader(run.checkpoints / f"step-{step}"))
            without, palimpsa = sides if turn.letters == WITH_IMPORTANCE else reversed(sides)
            found = compare(layers, without, palimpsa, tokens)
            report = {
                "source": str(there.checkpoint),
                "pattern": {"before": before.layers, "after": after.layers},
                "layers": changed(before, after),
                "parameters": _counts(old, new),
                "moments": there.optimizer_steps > 0,
                "seed": seed,
                "beta_rank": after.beta_rank,
                "beta_scale_init": after.beta_scale_init,
                "sample": {"of": sample, "tokens": len(tokens)},
                **dataclasses.asdict(found),
            }
            (run.path / REPORT).write_text(json.dumps(report, indent=1) + "\n")
            section = {name: value for name, value in settings.items() if value is not None and name != "seq_length"}
            complete(run, stage, section, there.tokenizer, step=step)
    finally:
        parallel.destroy()
    return report


def _check_changes(old: Mapping[str, Parameter], new: Mapping[str, Parameter], layers: list[int]) -> None:
    """Refuse models that differ in anything but the importance of `layers`."""
    allowed = {f"decoder.layers.{layer - 1}.mixer.{name}" for layer in layers for name in IMPORTANCE}
    if others := sorted((old.keys() ^ new.keys()) - allowed):
        raise ConfigError(f"{others[0]} is in one of the two models alone: that may only be {', '.join(IMPORTANCE)}")
    if differing := sorted(name for name in old.keys() & new.keys() if old[name] != new[name]):
        raise ConfigError(f"{differing[0]} would be another parameter: {old[differing[0]]} -> {new[differing[0]]}")


def _keys(parameters: Mapping[str, Parameter], kinds: Iterable[str]) -> list[tuple[str, str, Shape]]:
    """(kind, parameter's name, shape) of all that a checkpoint holds."""
    return [
        (kind, name, parameter.shape)
        for kind in kinds
        for name, parameter in parameters.items()
        if kind == "weight" or parameter.trainable
    ]


def _check_tensors(reader: Reader, parameters: Mapping[str, Parameter], kinds: Iterable[str], path: Path) -> None:
    # Moments that no step has used yet are of no use here either.
    wanted, allowed = (
        {PREFIXES[kind] + name: shape for kind, name, shape in _keys(parameters, some)} for some in (kinds, PREFIXES)
    )
    found = {key: shape for key, shape in reader.shapes().items() if not key.startswith(RANDOM_STATES)}
    require_tensors(found, wanted, allowed, f"{path}: not the tensors of the stage's model")


def _boxes(
    reader: Reader, keys: list[tuple[str, str, Shape]], old: Mapping[str, Parameter], model: ModelConfig, seed: int
) -> Iterator[tuple[Box, Tensor]]:
    """All weights and moments of the new stage; the moments of new parameters are zero, as before any update."""
    for kind, name, shape in keys:
        whole = None
        if name not in old:
            whole = drawn(name, shape, model, seed) if kind == "weight" else torch.zeros(shape)
        for rows in stretches(slice(0, shape[0]), *shape[1:]):
            part = (rows.stop - rows.start, *shape[1:])
            box = Box(PREFIXES[kind] + name, shape, (rows.start, *[0] * len(shape[1:])), part)
            value = torch.empty(part) if whole is None else whole[rows]
            if whole is None:
                reader.read(box, value)
            yield box, value


def _counts(old: Mapping[str, Parameter], new: Mapping[str, Parameter]) -> dict[str, int]:
    names = {"carried": old.keys() & new.keys(), "new": new.keys() - old.keys(), "dropped": old.keys() - new.keys()}
    every = {**old, **new}
    return {fate: sum(math.prod(every[name].shape) for name in some) for fate, some in names.items()}
