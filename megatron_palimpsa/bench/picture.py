"""Records as bars: tokens/s a rank, and what a step spends its time on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import pyplot as plt

from megatron_palimpsa.bench.profile import PARTS
from megatron_palimpsa.bench.record import Record
from megatron_palimpsa.report.style import COLOURS, save, tidy

_PARTS = (*PARTS, "other", "idle")
_SHADES = (*COLOURS, "0.6", "0.9")
_RATES = ("tokens_per_second", "tokens_per_second_lowest", "tokens_per_second_highest")


def draw(records: Sequence[Record], path: Path) -> None:
    """A row a case that ran, in the order in which they were measured."""
    done = [record for record in records if record["status"] == "ok"]
    names = [f"{record['case']} ({record['ranks']} ranks, T {record['seq_length']})" for record in done]
    profiled = any(record["share_other"] is not None for record in done)
    figure, every = plt.subplots(
        1, 1 + profiled, figsize=(7 + 4 * profiled, 1.4 + 0.32 * len(done)), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    axes = every[0]
    rates = [[record[key] / record["ranks"] for record in done] for key in _RATES]
    spread = [[m - low for m, low in zip(rates[0], rates[1], strict=True)],
              [high - m for m, high in zip(rates[0], rates[2], strict=True)]]  # fmt: skip
    axes[0].barh(names, rates[0], xerr=spread, color=COLOURS[0], capsize=3)
    axes[0].set_xlabel("tokens/s a rank")
    if profiled:
        _draw_shares(done, names, axes[1])
    for one in axes:
        tidy(one)
        one.grid(axis="x", color="0.92")
    axes[0].invert_yaxis()
    save(figure, path)


def _draw_shares(done: Sequence[Record], names: Sequence[str], axes: plt.Axes) -> None:
    reached = [0.0] * len(done)
    for part, colour in zip(_PARTS, _SHADES, strict=True):
        width = [record[f"share_{part}"] or 0.0 for record in done]
        axes.barh(names, width, left=reached, color=colour, label=part)
        reached = [left + more for left, more in zip(reached, width, strict=True)]
    axes.set_xlabel("share of the step (communication may run beside the rest)")
    axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
