"""All results of a folder for people: tables and a picture."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_palimpsa.evaluation import paper
from megatron_palimpsa.evaluation.results import Metric, TaskResult
from megatron_palimpsa.evaluation.tasks import PREFIX
from megatron_palimpsa.report.table import markdown_table

Ruler = dict[str, dict[int, Metric]]
"""Score by task and length."""


def ruler_scores(results: Sequence[TaskResult]) -> Ruler:
    """RULER's among the results."""
    found: Ruler = {}
    for result in results:
        if result.task.startswith(PREFIX):
            name, _, length = result.task.removeprefix(PREFIX).partition("/")
            found.setdefault(name, {})[int(length)] = result.metrics["score"]
    return found


def paper_columns(results: Sequence[TaskResult]) -> dict[str, Metric]:
    """The paper's columns, as far as their tasks are there; with the average when all are."""
    by_task = {result.task: result for result in results}
    found = {
        row.column: by_task[row.task].metrics[row.metric]
        for row in paper.TABLE
        if row.task in by_task and row.metric in by_task[row.task].metrics
    }
    averaged = [row.column for row in paper.TABLE if row.averaged]
    if all(column in found for column in averaged):
        found["average"] = Metric(sum(found[column].value for column in averaged) / len(averaged))
    return found


def markdown(results: Sequence[TaskResult]) -> str:
    """Tables of all results; accuracies and scores in per cent, each with its standard error."""
    parts = ["# Evaluation"]
    if columns := paper_columns(results):
        rows = [[name, _paper_cell(name, metric)] for name, metric in columns.items()]
        parts += ["## Tasks of the paper", markdown_table([["task", "value"], *rows])]
    if scores := ruler_scores(results):
        parts += ["## RULER", _ruler_table(scores)]
    others = [result for result in results if not result.task.startswith(PREFIX)]
    if others:
        rows = [
            [f"{result.task}: {name}", f"{result.items:,}", _number(metric.value), _stderr(metric)]
            for result in others
            for name, metric in result.metrics.items()
        ]
        header = ["task and metric", "items", "value", "standard error"]
        parts += ["## Everything that was measured", markdown_table([header, *rows])]
    if truncated := [line for result in results if (line := _truncation(result))]:
        parts += ["## Inputs that were too long", "\n".join(truncated)]
    return "\n\n".join(parts) + "\n"


def _ruler_table(scores: Ruler) -> str:
    lengths = sorted({length for own in scores.values() for length in own})
    rows = [
        [name, *(_percent(own[length]) if length in own else "" for length in lengths)] for name, own in scores.items()
    ]
    if len(scores) > 1:
        of_length = [[own[length].value for own in scores.values() if length in own] for length in lengths]
        rows.append(["mean", *(_percent(Metric(sum(values) / len(values))) for values in of_length)])
    return markdown_table([["task", *(f"{length:,}" for length in lengths)], *rows])


def _paper_cell(column: str, metric: Metric) -> str:
    return f"{metric.value:.2f}" if column.endswith("ppl") else _percent(metric)


def _percent(metric: Metric) -> str:
    error = "" if metric.stderr is None else f" ± {100 * metric.stderr:.1f}"
    return f"{100 * metric.value:.1f}{error}"


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.3e}"


def _stderr(metric: Metric) -> str:
    return "" if metric.stderr is None else _number(metric.stderr)


def _truncation(result: TaskResult) -> str:
    truncation = result.details.get("truncation") or {}
    if not truncation.get("inputs"):
        return ""
    return (
        f"- {result.task}: {truncation['inputs']:,} inputs lost {truncation['tokens']:,} tokens together; the longest "
        f"had {truncation['longest']:,}"
    )
