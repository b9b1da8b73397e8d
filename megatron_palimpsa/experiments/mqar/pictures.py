"""The paper's Fig. 2 and Fig. 3 of the runs that there are."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from megatron_palimpsa.experiments.mqar.config import Lesson
from megatron_palimpsa.experiments.mqar.records import Record
from megatron_palimpsa.experiments.mqar.summary import Accuracy, RunRecords, best_rate
from megatron_palimpsa.report.style import COLOURS, save, tidy

_STYLES = ("-", "--", ":", "-.")


def draw_accuracy(rows: Sequence[Accuracy], path: Path) -> None:
    """Mean accuracy by length with the standard deviation over seeds, and each seed as a dot; a colour a model."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    models = list(dict.fromkeys(row.model for row in rows))
    for model, colour in zip(models, _colours(len(models)), strict=True):
        mine = sorted((row for row in rows if row.model == model), key=lambda row: row.length)
        spread = [0.0 if math.isnan(row.spread) else row.spread for row in mine]
        axes.errorbar(
            [row.length for row in mine],
            [row.mean for row in mine],
            yerr=spread,
            color=colour,
            marker="o",
            capsize=4,
            linewidth=1.8,
            label=model,
        )
        for row in mine:
            axes.plot([row.length] * len(row.values), row.values, ".", color=colour, alpha=0.4, markersize=5)
    lengths = sorted({(row.length, row.pairs) for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(
        [length for length, _ in lengths], [f"{length}\n{pairs} pairs" for length, pairs in lengths], minor=False
    )
    axes.minorticks_off()
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("tokens of an example")
    axes.set_ylabel("accuracy at the queries")
    tidy(axes)
    axes.legend(frameon=False)
    save(figure, path)


def draw_training(runs: Sequence[RunRecords], path: Path) -> None:
    """Memory window, importance ratio and loss over the curriculum; a colour a model, a line style a layer.

    Each model at its `best_rate`: median over seeds, shaded from the lowest to the highest.
    """
    figure, (window, ratio, loss) = plt.subplots(3, 1, figsize=(9, 9), sharex=True, layout="constrained")
    by_model: dict[str, list[RunRecords]] = defaultdict(list)
    for item in runs:
        by_model[item.run.config.name].append(item)
    for (model, items), colour in zip(by_model.items(), _colours(len(by_model)), strict=True):
        rate = best_rate(items)
        chosen = [item for item in items if item.run.lr == rate]
        label = f"{model} (lr {rate:g}, {len(chosen)} seed{'s' if len(chosen) > 1 else ''})"
        layers = sorted({layer for item in chosen for record in item.records for layer in record["memory"]}, key=int)
        for layer, style in zip(layers, _STYLES * len(layers), strict=False):
            named = f"{label}, layer {layer}"
            _band(window, chosen, _memory(layer, "window"), colour, style, named)
            _band(ratio, chosen, _memory(layer, "importance_ratio"), colour, style, named)
        _band(loss, chosen, lambda record: record["train_loss"], colour, "-", label)
    window.set_ylabel("memory window $N_t$ (tokens, median)")
    ratio.set_ylabel("importance ratio $r$ (median)")
    loss.set_ylabel("training loss (nats a query)")
    lessons = max((item.run.config.curriculum for item in runs), key=len)
    for axes in (window, ratio, loss):
        tidy(axes)
        _mark_lessons(axes, lessons, named=axes is window)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    for axes in (window, ratio):
        axes.set_yscale("log")
    loss.set_xlabel("epochs of the curriculum")
    save(figure, path)


def _colours(count: int) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(count)]


def _memory(layer: str, kind: str) -> Callable[[Record], float | None]:
    return lambda record: record["memory"].get(layer, {}).get(kind)


def _starts(lessons: Sequence[Lesson]) -> list[int]:
    """Epochs before each lesson, and at the end of the last, where none ends early."""
    starts = [0]
    for lesson in lessons:
        starts.append(starts[-1] + lesson.epochs)
    return starts


def _band(
    axes: Axes,
    items: Sequence[RunRecords],
    value: Callable[[Record], float | None],
    colour: str,
    style: str,
    label: str,
) -> None:
    points: dict[int, list[float]] = defaultdict(list)
    for item in items:
        starts = _starts(item.run.config.curriculum)
        for record in item.records:
            if (number := value(record)) is not None:
                points[starts[record["lesson"]] + record["epoch"] + 1].append(number)
    if not points:
        return
    epochs = sorted(points)
    axes.plot(epochs, [statistics.median(points[e]) for e in epochs], style, color=colour, linewidth=1.6, label=label)
    lowest, highest = [min(points[e]) for e in epochs], [max(points[e]) for e in epochs]
    axes.fill_between(epochs, lowest, highest, color=colour, alpha=0.15, linewidth=0)


def _mark_lessons(axes: Axes, lessons: Sequence[Lesson], named: bool) -> None:
    starts = _starts(lessons)
    for border in starts[1:-1]:
        axes.axvline(border, color="0.75", linewidth=1, zorder=0)
    if named:
        for lesson, start, end in zip(lessons, starts, starts[1:], strict=False):
            place = axes.get_xaxis_transform()
            axes.text((start + end) / 2, 1.02, str(lesson.length), transform=place, ha="center", va="bottom")
    axes.set_xlim(0, starts[-1])
