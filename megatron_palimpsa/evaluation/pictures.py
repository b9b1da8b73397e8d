"""One picture of a folder's results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from megatron_palimpsa.evaluation import paper
from megatron_palimpsa.evaluation.results import Metric, TaskResult
from megatron_palimpsa.evaluation.tables import Ruler, paper_columns, ruler_scores
from megatron_palimpsa.report.style import COLOURS, save, tidy

_MARKERS = "osv^D"


def draw(results: Sequence[TaskResult], path: Path) -> bool:
    """Accuracies as bars, RULER's scores over the length; whether there was anything to draw."""
    bars = {name: metric for name, metric in paper_columns(results).items() if not name.endswith("ppl")}
    for result in results:
        if "acc" in result.metrics and result.task not in paper.TASKS:
            bars[result.task] = result.metrics["acc"]
    scores = ruler_scores(results)
    panels = [panel for panel in (bars, scores) if panel]
    if not panels:
        return False
    figure, axes = plt.subplots(1, len(panels), figsize=(7 * len(panels), 4.5), layout="constrained", squeeze=False)
    places = list(axes[0])
    if bars:
        _draw_bars(places.pop(0), bars)
    if scores:
        _draw_ruler(places.pop(0), scores)
    temporary = path.with_name(f".{path.stem}.tmp.png")
    save(figure, temporary)
    temporary.replace(path)
    return True


def _draw_bars(axes: Axes, bars: dict[str, Metric]) -> None:
    errors = [100 * (metric.stderr or 0.0) for metric in bars.values()]
    heights = [100 * metric.value for metric in bars.values()]
    axes.bar(range(len(bars)), heights, yerr=errors, color=COLOURS[0], ecolor="0.4", capsize=3)
    axes.set_xticks(range(len(bars)), list(bars), rotation=30, ha="right")
    axes.set_ylabel("accuracy (per cent, with standard error)")
    tidy(axes)


def _draw_ruler(axes: Axes, scores: Ruler) -> None:
    for number, (name, own) in enumerate(scores.items()):
        lengths = sorted(own)
        axes.plot(
            lengths,
            [100 * own[length].value for length in lengths],
            color=COLOURS[number % len(COLOURS)],
            marker=_MARKERS[number // len(COLOURS) % len(_MARKERS)],
            label=name,
        )
    lengths = sorted({length for own in scores.values() for length in own})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_ylim(-3, 103)
    axes.set_xlabel("tokens")
    axes.set_ylabel("RULER score (per cent)")
    axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    tidy(axes)
