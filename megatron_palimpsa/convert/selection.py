"""The folder that `convert select-layers` writes: a pattern for recipes, tables and pictures."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_palimpsa.convert.stage_folder import new_stage
from megatron_palimpsa.convert.windows import LayerWindows, Quartiles, position_edges

PATTERN = "pattern.yaml"


@dataclass(frozen=True)
class Selection:
    """What was measured and chosen."""

    origin: str
    """Of which layers, by which text."""
    layers: list[LayerWindows]
    chosen: list[int]
    """Numbers of layers from 1, ascending."""
    pattern: str
    """With the chosen layers as P."""
    seq_length: int
    """Tokens of a row of the text."""


def write_selection(output: Path, selection: Selection) -> None:
    """Write the folder `output`, which appears by one rename."""
    from megatron_palimpsa.report.windows import draw_positions, draw_windows

    with new_stage(output) as place:
        folder = place.path
        text = f"# {json.dumps(selection.origin)[1:-1]}\nmodel:\n  pattern: {json.dumps(selection.pattern)}\n"
        (folder / PATTERN).write_text(text)
        names = ["quartile_1", "median", "quartile_3"]
        _write_csv(folder / "layers.csv", ["layer", "symbol", "chosen", *names], _layer_rows(selection))
        _write_csv(folder / "heads.csv", ["layer", "head", *names], _head_rows(selection))
        draw_windows(selection.layers, selection.chosen, folder / "windows.png")
        edges = position_edges(selection.seq_length).tolist()
        draw_positions(selection.layers, selection.chosen, edges, folder / "positions.png")


def _write_csv(path: Path, header: list[str], rows: Iterable[list[object]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])


def _layer_rows(selection: Selection) -> Iterable[list[object]]:
    for layer in selection.layers:
        chosen = int(layer.number in selection.chosen)
        yield [layer.number, layer.symbol, chosen, *_numbers(layer.whole)]


def _head_rows(selection: Selection) -> Iterable[list[object]]:
    for layer in selection.layers:
        for head, quartiles in enumerate(layer.heads, 1):
            yield [layer.number, head, *_numbers(quartiles)]


def _numbers(quartiles: Quartiles) -> list[object]:
    return [f"{value:.8g}" for value in (quartiles.low, quartiles.median, quartiles.high)]


def table(selection: Selection) -> str:
    """For people: the layers by their medians, longest first, as far as the first few that were not chosen."""
    ranked = sorted(selection.layers, key=lambda layer: -layer.whole.median)
    shown = ranked[: len(selection.chosen) + 4]
    width = max(8, *(len(f"{layer.whole.high:,.1f}") for layer in shown))
    lines = [f"layer     {'quartile':>{width}}  {'median':>{width}}  {'quartile':>{width}}  window, tokens"]
    for layer in shown:
        values = "  ".join(f"{value:>{width},.1f}" for value in vars(layer.whole).values())
        lines.append(f"{layer.number:>5} {layer.symbol}   {values}{'  chosen' * (layer.number in selection.chosen)}")
    return "\n".join(lines)
