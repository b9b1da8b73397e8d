"""`convert select-layers`: which Mamba2 layers of a model remember longest, measured on text.

The layers with the largest median window over heads and tokens are those that the paper replaces (arXiv 2602.09075).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Literal

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.convert.sample import Sample, sample_rows
from megatron_palimpsa.convert.selection import Selection, write_selection
from megatron_palimpsa.convert.stage_folder import require_new
from megatron_palimpsa.convert.windows import LayerWindows, measure
from megatron_palimpsa.inference.opened import opened
from megatron_palimpsa.training.console import clock

logger = logging.getLogger(__name__)

_SAID_EVERY = 10.0
"""Seconds between two lines of progress."""


def select_layers(
    stage: Path,
    sample: Sample,
    count: int,
    output: Path,
    *,
    precision: Literal["bf16", "fp32"] | None = None,
    tokenizer: Path | None = None,
) -> Selection:
    """Measure the windows of a stage's model and write the folder `output`, which appears when it is whole.

    `pattern.yaml` is a `model:` section with the chosen layers as P, which recipes inherit; `layers.csv` and
    `heads.csv` have the windows' quartiles; `windows.png` and `positions.png` show them.

    Args:
        count: of the Mamba2 layers to choose.
        precision, tokenizer: as of `opened`.

    Raises:
        ConfigError: the stage or the text cannot be read or do not fit each other, the model has fewer Mamba2 layers
            than `count`, or `output` is there already.
        DataError: the tokenizer cannot be read.
        OSError: `output` cannot be written.
    """
    require_new(output)
    if sample.tokens < sample.seq_length:
        raise ConfigError(f"{sample.tokens} tokens fill no row of {sample.seq_length}: take more, or shorter rows")
    with opened(stage, precision, tokenizer) as it:
        model = it.config.model
        _check_count(count, model.layers)
        batches = sample_rows(it, sample)
        tokens = sum(int(batch.cu_seqlens[-1]) for batch in batches)
        logger.info("%s: windows of %s tokens in %d rows", it.checkpoint, f"{tokens:,}", len(batches))
        layers = measure(it.model, model.layers, batches, sample.seq_length, _telling(len(batches)))
        chosen = choose(layers, count)
        origin = (
            f"{count} of {model.layers.count('M')} Mamba2 layers of {it.checkpoint}, by {tokens:,} tokens of "
            f"{sample.path}"
        )
        selection = Selection(origin, layers, chosen, with_palimpsa(model.pattern, chosen), sample.seq_length)
    write_selection(output, selection)
    return selection


def choose(layers: Sequence[LayerWindows], count: int) -> list[int]:
    """Numbers of the `count` Mamba2 layers with the largest medians, ascending; of equal ones the first."""
    candidates = [layer for layer in layers if layer.symbol == "M"]
    longest = sorted(candidates, key=lambda layer: (-layer.whole.median, layer.number))[:count]
    return sorted(layer.number for layer in longest)


def with_palimpsa(pattern: str, numbers: Collection[int]) -> str:
    """The pattern with these layers, counted from 1 without the borders, as P."""
    letters: list[str] = []
    number = 0
    for letter in pattern:
        number += letter != "|"
        letters.append("P" if letter != "|" and number in numbers else letter)
    return "".join(letters)


def _check_count(count: int, layers: str) -> None:
    if not 1 <= count <= layers.count("M"):
        raise ConfigError(f"--layers {count}: the model has {layers.count('M')} Mamba2 layers (M) of {len(layers)}")


def _telling(rows: int) -> Callable[[int, float], None]:
    said = time.monotonic()

    def progress(done: int, seconds_left: float) -> None:
        nonlocal said
        if time.monotonic() - said >= _SAID_EVERY:
            said = time.monotonic()
            logger.info("%d of %d rows | %s left", done, rows, clock(seconds_left))

    return progress
