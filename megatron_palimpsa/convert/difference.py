"""How far a model with Palimpsa layers is from the one with layers without importance in their place, on a sample."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.convert.layerwise import LayerByLayer
from megatron_palimpsa.training.checkpoint_format import Reader
from megatron_palimpsa.training.console import clock

logger = logging.getLogger(__name__)

ALLOWED = 1e-5
"""Between what two kernels make of the same, as a share of the largest number (of 1 where all are smaller)."""
_AT_ONCE = 128
"""Tokens whose logits exist at once."""
_SAID_EVERY = 10.0


@dataclass(frozen=True)
class Difference:
    """Between the logits of the two models, the plain one without importance, at all positions of a sample."""

    largest: float
    mean: float
    mean_kl: float
    """KL(plain || Palimpsa) of the next token's distributions, in nats."""
    nll_plain: float
    """Of the sample's tokens but the first, a token, in nats."""
    nll_palimpsa: float
    largest_logit: float


@dataclass(frozen=True)
class Side:
    """One of the two models."""

    layers: str
    """Its pattern."""
    reader: Reader


@dataclass(frozen=True)
class Comparison:
    """What `compare` finds."""

    importance_zero: Difference
    """From Palimpsa layers with beta 0 and prior 1, which go through the Palimpsa layers' own computation."""
    importance: Difference
    """From the Palimpsa layers as they are."""
    farthest_step: float
    """The largest difference that importance 0 makes in one layer's output, both from the same input, as a share."""


def compare(layers: LayerByLayer, without: Side, palimpsa: Side, tokens: Tensor) -> Comparison:
    """Run both models over a document.

    Args:
        layers: of all letters of both patterns.
        without: with M or L where `palimpsa` has P or Q; else they are the same.
        tokens: [T], at least 2 ids.

    Raises:
        ConfigError: with importance 0 the logits differ by more than rounding, and so does what some layer by itself
            makes of the same input: a deep model may make more of rounding.
    """
    tokens = tokens.to(layers.device)
    layers.load_around(without.reader)
    plain = layers.embed(tokens[None])
    layers.load_around(palimpsa.reader)
    silent = full = layers.embed(tokens[None])
    steps = [_share(plain, silent)]
    start = said = time.monotonic()
    for index, (letter, other) in enumerate(zip(without.layers, palimpsa.layers, strict=True)):
        layers.load(without.reader, letter, index)
        plain, expected = layers.apply(letter, torch.cat([plain, silent], dim=1)).split(1, dim=1)
        layers.load(palimpsa.reader, other, index)
        if letter == other:
            silent, full = layers.apply(other, torch.cat([silent, full], dim=1)).split(1, dim=1)
        else:
            full = layers.apply(other, full)
            layers.silence(other)
            silent = layers.apply(other, silent)
        steps.append(_share(expected, silent))
        now = time.monotonic()
        if now - said >= _SAID_EVERY:
            said, depth = now, len(without.layers)
            left = clock((now - start) * (depth - index - 1) / (index + 1))
            logger.info("layer %d of %d compared | %s left", index + 1, depth, left)
    logits, full_logits = layers.logits(torch.cat([silent, full], dim=1)).unbind(1)
    layers.load_around(without.reader)
    plain_logits, expected = layers.logits(torch.cat([plain, silent], dim=1)).unbind(1)
    steps.append(_share(expected, logits))
    zero = difference(plain_logits, logits, tokens)
    farthest = torch.stack(steps).max()
    if not (zero.largest <= ALLOWED * max(1.0, zero.largest_logit) or farthest <= ALLOWED):
        raise ConfigError(
            f"with importance 0 the Palimpsa layers' logits differ from those without it by {zero.largest:.3g} (the "
            f"largest is {zero.largest_logit:.3g}), and one layer's output by {float(farthest):.3g} of its largest: "
            f"more than rounding, {ALLOWED:g}"
        )
    return Comparison(zero, difference(plain_logits, full_logits, tokens), float(farthest))


def _share(expected: Tensor, found: Tensor) -> Tensor:
    """The largest difference as a share of the largest number, or of 1; NaN where there is one."""
    return (expected - found).abs().max() / expected.abs().max().clamp(min=1.0)


def difference(plain: Tensor, palimpsa: Tensor, tokens: Tensor) -> Difference:
    """Of two models' logits [T, V] on ids [T]."""
    count, distances, divergence = len(tokens), [], 0.0
    losses = [0.0, 0.0]
    for first in range(0, count, _AT_ONCE):
        parts = [logits[first : first + _AT_ONCE] for logits in (plain, palimpsa)]
        distance = (parts[0] - parts[1]).abs()
        distances.append(torch.stack([distance.max(), distance.mean() * (len(distance) / count)]))
        logs = [part.double().log_softmax(-1) for part in parts]
        divergence += float(F.kl_div(logs[1], logs[0], log_target=True, reduction="sum"))
        targets = tokens[first + 1 : first + 1 + _AT_ONCE]
        for model, log in enumerate(logs):
            losses[model] += float(F.nll_loss(log[: len(targets)], targets, reduction="sum"))
    largest, mean = torch.stack(distances).unbind(1)
    return Difference(
        float(largest.max()),
        float(mean.sum()),
        divergence / count,
        losses[0] / (count - 1),
        losses[1] / (count - 1),
        float(torch.maximum(plain.abs().max(), palimpsa.abs().max())),
    )
