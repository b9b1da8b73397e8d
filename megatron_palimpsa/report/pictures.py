"""The report's pictures; every function takes the stages' records and writes one PNG."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator

from megatron_palimpsa.config import IMPORTANCE_SYMBOLS
from megatron_palimpsa.report.stages import StageRecords
from megatron_palimpsa.report.style import COLOURS, save, tidy


def _starts(stages: Sequence[StageRecords]) -> list[int]:
    """Tokens seen before each stage, and at the end of the last."""
    return [0, *accumulate(stage.end["tokens"] for stage in stages)]


def _token_axis(axes: Axes, stages: Sequence[StageRecords]) -> None:
    starts = _starts(stages)
    for border in starts[1:-1]:
        axes.axvline(border, color="0.75", linewidth=1, zorder=0)
    for stage, start, end in zip(stages, starts, starts[1:], strict=False):
        axes.text((start + end) / 2, 1.02, stage.name, transform=axes.get_xaxis_transform(), ha="center", va="bottom")
    axes.set_xlim(0, starts[-1])
    axes.xaxis.set_major_formatter(FuncFormatter(_short_tokens))
    tidy(axes)


def _short_tokens(tokens: float, _position: int | None = None) -> str:
    if tokens == 0:
        return "0"
    return f"{tokens / 1e6:g}M" if tokens >= 1e6 else f"{tokens / 1e3:g}K"


def draw_losses(stages: Sequence[StageRecords], path: Path) -> None:
    """Training and validation loss over the tokens of all stages."""
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    for stage, start in zip(stages, _starts(stages), strict=False):
        first = stage is stages[0]
        train = [record for record in stage.train if record["loss"] is not None]
        axes.plot(
            [start + record["tokens"] for record in train],
            [record["loss"] for record in train],
            color=COLOURS[5],
            linewidth=1.2,
            label="training" if first else None,
        )
        axes.plot(
            [start + record["tokens"] for record in stage.valid],
            [record["loss"] for record in stage.valid],
            color=COLOURS[1],
            marker="o",
            markersize=4,
            linewidth=1.5,
            label="validation" if first else None,
        )
    _token_axis(axes, stages)
    axes.set_xlabel("tokens seen")
    axes.set_ylabel("loss (nats a token)")
    axes.legend(frameon=False, loc="lower left")
    save(figure, path)


def draw_loss_by_position(stage: StageRecords, path: Path) -> None:
    """Validation loss by the token's position in its document, before and after the stage."""
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    edges = stage.valid[-1]["position_edges"]
    # The buckets double in width; drawn equally wide, each is as easy to read as the next.
    places = range(len(edges))
    for record, colour, when in ((stage.valid[0], "0.6", "before"), (stage.valid[-1], COLOURS[0], "after")):
        losses = [float("nan") if loss is None else loss for loss in record["loss_by_position"]]
        label = f"{when} the stage (step {record['step']:,}, mean {record['loss']:.3f})"
        axes.stairs(losses, places, baseline=None, color=colour, linewidth=2.2, label=label)
    axes.set_xticks(places, [str(edge) for edge in edges])
    axes.set_xlim(places[0], places[-1])
    axes.set_xlabel("position in the document (tokens)")
    axes.set_ylabel("validation loss (nats a token)")
    axes.set_title(stage.name, fontsize="medium")
    tidy(axes)
    axes.legend(frameon=False)
    save(figure, path)


_MEMORY = {
    "window": "memory window $N_t$ (tokens, median)",
    "importance_ratio": "importance ratio $r$ (median of heads)",
}


def draw_memory(stages: Sequence[StageRecords], symbols: str, path: Path) -> bool:
    """Memory window N_t and importance ratio r = (I_max - I_min) / I_min of each layer over training.

    `symbols` names the layers, one letter each (`MPM*-P`); layers are numbered from 1.

    Returns:
        Whether there is a picture: not where no layer has a state.
    """
    recorded = [values for stage in stages for record in stage.valid for values in record["memory"].values()]
    kinds = [kind for kind in _MEMORY if any(values.get(kind) is not None for values in recorded)]
    if not kinds:
        return False
    height = 0.5 + 3.25 * len(kinds)
    figure, every = plt.subplots(len(kinds), 1, figsize=(9, height), sharex=True, squeeze=False, layout="constrained")
    for kind, axes in zip(kinds, every.flat, strict=True):
        _draw_by_layer(axes, stages, symbols, kind)
        axes.set_ylabel(_MEMORY[kind])
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        _token_axis(axes, stages)
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    for axes in every.flat[1:]:
        for text in list(axes.texts):
            text.remove()
    every.flat[-1].set_xlabel("tokens seen")
    save(figure, path)
    return True


def _draw_by_layer(axes: Axes, stages: Sequence[StageRecords], symbols: str, kind: str) -> None:
    layers = sorted({int(layer) for stage in stages for record in stage.valid for layer in record["memory"]})
    for index, layer in enumerate(layers):
        symbol = symbols[layer - 1]
        style: dict[str, Any] = {
            "color": COLOURS[index % len(COLOURS)],
            "linestyle": "-" if symbol in IMPORTANCE_SYMBOLS else "--",
            "marker": "o",
            "markersize": 3.5,
            "linewidth": 1.6,
        }
        label: str | None = f"layer {layer} ({symbol})"
        for stage, start in zip(stages, _starts(stages), strict=False):
            points = [
                (start + record["tokens"], number)
                for record in stage.valid
                if (number := record["memory"].get(str(layer), {}).get(kind)) is not None
            ]
            if points:
                axes.plot(*zip(*points, strict=True), label=label, **style)
                label = None
