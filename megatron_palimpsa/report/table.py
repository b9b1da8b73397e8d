"""The table of stages, the same text for the console and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_palimpsa.report.stages import StageSummary

_HEADER = (
    "stage", "steps", "tokens", "tokens/s", "validation loss before", "after", "peak memory"
)  # fmt: skip


def format_table(summaries: Sequence[StageSummary]) -> str:
    """A Markdown table whose columns line up in a terminal too."""
    return markdown_table([_HEADER, *(_cells(summary) for summary in summaries)])


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the header first; the first column is flush left, the others are flush right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [_line(row, widths) for row in rows]
    rule = "|".join(["", "-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:]), ""])
    return "\n".join([lines[0], rule, *lines[1:]])


def _cells(summary: StageSummary) -> tuple[str, ...]:
    return (
        summary.stage,
        f"{summary.steps:,}",
        f"{summary.tokens:,}",
        f"{summary.tokens_per_second:,.0f}",
        f"{summary.loss_before:.3f}",
        f"{summary.loss_after:.3f}",
        f"{summary.peak_memory_bytes / 2**20:,.0f} MiB",
    )


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *numbers = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
    return " ".join(["|", " | ".join([first.strip().ljust(widths[0]), *numbers]), "|"])
