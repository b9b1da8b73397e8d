"""The picture of `eval nll`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from megatron_palimpsa.report.style import COLOURS, save, tidy

if TYPE_CHECKING:
    from megatron_palimpsa.evaluation.nll import Bin


def draw(bins: Sequence[Bin], names: Sequence[str], path: Path, even: bool) -> None:
    """Both losses by position, and below their difference with its 95 % band; `even`: the bins are of one width."""
    figure, (losses, difference) = plt.subplots(2, 1, figsize=(9, 7), sharex=True, layout="constrained")
    centres = [(one.start + one.stop) / 2 for one in bins]
    for values, colour, name in (
        ([one.a for one in bins], COLOURS[1], names[0]),
        ([one.b for one in bins], COLOURS[0], names[1]),
    ):
        losses.plot(centres, values, color=colour, marker="o", markersize=3, label=name)
    losses.set_ylabel("NLL (nats a token)")
    losses.legend(frameon=False)
    difference.axhline(0, color="0.5", linewidth=1)
    lows, highs = [one.low for one in bins], [one.high for one in bins]
    difference.fill_between(centres, lows, highs, color=COLOURS[2], alpha=0.25, linewidth=0)
    difference.plot(centres, [one.difference for one in bins], color=COLOURS[2], marker="o", markersize=3)
    difference.set_ylabel("B - A, 95 % over documents")
    difference.set_xlabel("tokens before in the document")
    for axes in (losses, difference):
        tidy(axes)
        if not even:
            _scale_by_doubling(axes, bins)
    temporary = path.with_name(f".{path.stem}.tmp.png")
    save(figure, temporary)
    temporary.replace(path)


def _scale_by_doubling(axes: Axes, bins: Sequence[Bin]) -> None:
    """Each bin is named where it is drawn, by the positions that it holds."""
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    names = [f"{one.start:,}-{one.stop - 1:,}" for one in bins]
    axes.set_xticks([(one.start + one.stop) / 2 for one in bins], names, rotation=30, ha="right")
