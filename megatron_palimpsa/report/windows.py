"""Pictures of memory windows by layer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.colors import LogNorm
from matplotlib.ticker import LogLocator, MaxNLocator

from megatron_palimpsa.report.style import COLOURS, save, tidy

if TYPE_CHECKING:
    from megatron_palimpsa.convert.windows import LayerWindows


def draw_windows(layers: Sequence[LayerWindows], chosen: Collection[int], path: Path) -> None:
    """Median and quartiles of each layer's windows on a log axis, those of the chosen layers in another colour."""
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    groups = [
        ("chosen", COLOURS[1], "D", [layer for layer in layers if layer.number in chosen]),
        ("Mamba2", COLOURS[0], "o", [layer for layer in layers if layer.symbol == "M" and layer.number not in chosen]),
        ("not Mamba2", COLOURS[2], "s", [layer for layer in layers if layer.symbol != "M"]),
    ]
    for label, colour, marker, members in groups:
        if members:
            medians = np.array([layer.whole.median for layer in members])
            spread = [
                medians - [layer.whole.low for layer in members],
                [layer.whole.high for layer in members] - medians,
            ]
            numbers = [layer.number for layer in members]
            axes.errorbar(numbers, medians, spread, fmt=marker, color=colour, markersize=5, elinewidth=1.2, label=label)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("layer")
    axes.set_ylabel("memory window $N_t$ (tokens; median, quartiles)")
    tidy(axes)
    axes.legend(frameon=False)
    save(figure, path)


def draw_positions(layers: Sequence[LayerWindows], chosen: Collection[int], edges: Sequence[int], path: Path) -> None:
    """Median window of each layer by the token's position in its document; chosen layers are marked on the left."""
    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.12 * max(len(layers), 16)), layout="constrained")
    values = np.ma.masked_invalid([layer.by_position for layer in layers])
    rows = np.arange(len(layers) + 1)
    picture = axes.pcolormesh(edges, rows, values, norm=LogNorm(), cmap="viridis")
    step = -(-len(layers) // 32)
    shown = [row for row, layer in enumerate(layers) if row % step == 0 or layer.number in chosen]
    axes.set_yticks([row + 0.5 for row in shown], [str(layers[row].number) for row in shown], fontsize="small")
    for row, label in zip(shown, axes.get_yticklabels(), strict=True):
        if layers[row].number in chosen:
            label.set(color=COLOURS[1], fontweight="bold")
    axes.invert_yaxis()
    axes.set_xlabel("position in the document (tokens)")
    axes.set_ylabel("layer (chosen: bold)")
    figure.colorbar(picture, label="memory window $N_t$ (tokens, median)")
    save(figure, path)
