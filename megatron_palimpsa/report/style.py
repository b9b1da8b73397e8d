"""How every picture of the project looks."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

# Okabe and Ito's palette: told apart by readers who see colours differently.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DPI = 110


def tidy(axes: Axes) -> None:
    """Pale horizontal lines behind the data, no frame at the top and on the right."""
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: plt.Figure, path: Path) -> None:
    """Write the picture and forget it."""
    figure.savefig(path, dpi=_DPI)
    plt.close(figure)
