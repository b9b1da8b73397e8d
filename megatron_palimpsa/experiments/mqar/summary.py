"""What finished lessons say: accuracy of every run, and over seeds at each seed's best learning rate."""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_palimpsa.experiments.mqar.config import SweepConfig
from megatron_palimpsa.experiments.mqar.files import write_whole
from megatron_palimpsa.experiments.mqar.records import Record, Run, has_diverged, lesson_is_over, read_records

_FOLDER = re.compile(r"lr-(?P<lr>\d+(\.\d+)?(e[+-]\d+)?)-seed-(?P<seed>\d+)")
_MEMORY = ("window", "importance_ratio")


@dataclass(frozen=True)
class RunRecords:
    """A run's epochs so far."""

    run: Run
    records: list[Record]

    @property
    def finished_lessons(self) -> list[Record]:
        """The last epoch of each."""
        config = self.run.config
        limit = config.train.stop_at_accuracy
        return [r for r in self.records if lesson_is_over(config.curriculum[r["lesson"]], r, limit)]


@dataclass(frozen=True)
class Accuracy:
    """Of one model behind one lesson, each seed at the learning rate that was best for it there."""

    model: str
    length: int
    pairs: int
    by_seed: dict[int, tuple[float, float]]
    """Seed -> (accuracy, learning rate)."""

    @property
    def values(self) -> list[float]:
        return [accuracy for accuracy, _ in self.by_seed.values()]

    @property
    def mean(self) -> float:
        return statistics.mean(self.values)

    @property
    def spread(self) -> float:
        """Standard deviation over seeds; nan for one seed."""
        return statistics.stdev(self.values) if len(self.by_seed) > 1 else math.nan


def read_runs(config: SweepConfig) -> list[RunRecords]:
    """All runs in the sweep's folder that have an epoch behind them, chosen by the recipe or not.

    Raises:
        ConfigError: a run's files are damaged.
    """
    runs = []
    for folder in config.folder.glob("lr-*-seed-*"):
        if (name := _FOLDER.fullmatch(folder.name)) is not None:
            run = Run(config, float(name["lr"]), int(name["seed"]))
            # Others are not ours: `lr-0.010-seed-0` is no second run of 0.01.
            if run.folder == folder:
                runs.append(run)
    runs.sort(key=lambda run: (run.seed, run.lr))
    found = [RunRecords(run, read_records(run)) for run in runs]
    return [item for item in found if item.records]


def accuracies(runs: Iterable[RunRecords]) -> list[Accuracy]:
    """By model and lesson, in the order of the runs and of the curriculum."""
    best: dict[tuple[str, int, int, int], dict[int, tuple[float, float]]] = defaultdict(dict)
    for item in runs:
        for record in item.finished_lessons:
            seeds = best[item.run.config.name, record["lesson"], record["length"], record["pairs"]]
            here = record["accuracy"], item.run.lr
            seeds[item.run.seed] = max(seeds.get(item.run.seed, here), here)
    return [Accuracy(model, length, pairs, by_seed) for (model, _, length, pairs), by_seed in best.items()]


def diverged(runs: Iterable[RunRecords]) -> list[str]:
    """Names of the runs that a loss which was not finite has ended: no later lesson counts them."""
    return [item.run.name for item in runs if has_diverged(item.records[-1])]


def best_rate(runs: Sequence[RunRecords]) -> float:
    """Of one model: the learning rate with the highest mean accuracy in the last epoch that most of its seeds have."""
    by_rate: dict[float, list[Record]] = defaultdict(list)
    for item in runs:
        by_rate[item.run.lr].append(item.records[-1])
    furthest = {lr: max((r["lesson"], r["epoch"]) for r in records) for lr, records in by_rate.items()}
    return max(
        by_rate,
        key=lambda lr: (furthest[lr][0], len(by_rate[lr]), statistics.mean(r["accuracy"] for r in by_rate[lr])),
    )


def table(rows: Iterable[Accuracy]) -> str:
    """Markdown, accuracy in per cent."""
    header = ("model", "length", "pairs", "accuracy", "over seeds", "lowest", "highest", "seeds", "learning rates")
    cells = [header, ("---", *("---:" for _ in header[1:]))]
    for row in rows:
        rates = sorted({lr for _, lr in row.by_seed.values()})
        cells.append(
            (
                row.model,
                str(row.length),
                str(row.pairs),
                f"{100 * row.mean:.1f} %",
                "" if math.isnan(row.spread) else f"± {100 * row.spread:.1f}",
                f"{100 * min(row.values):.1f} %",
                f"{100 * max(row.values):.1f} %",
                str(len(row.by_seed)),
                ", ".join(f"{lr:g}" for lr in rates),
            )
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def write_accuracy_csv(runs: Iterable[RunRecords], path: Path) -> None:
    """A line a finished lesson of every run."""
    fields = ("model", "length", "pairs", "lr", "seed", "epochs", "accuracy", "loss")
    rows = [
        (run.config.name, r["length"], r["pairs"], run.lr, run.seed, r["epoch"] + 1, r["accuracy"], r["loss"])
        for run, lessons in ((item.run, item.finished_lessons) for item in runs)
        for r in lessons
    ]
    _write_csv(path, fields, rows)


def write_training_csv(runs: Sequence[RunRecords], path: Path) -> None:
    """A line an epoch of every run; memory statistics by layer, counted from 1."""
    layers = max((len(record["memory"]) for item in runs for record in item.records), default=0)
    columns = [(str(layer), kind) for layer in range(1, layers + 1) for kind in _MEMORY]
    fields = ["model", "lr", "seed", "length", "epoch", "train_loss", "accuracy", "loss", "tokens", "seconds"]
    rows = []
    for item in runs:
        for record in item.records:
            start: list[Any] = [item.run.config.name, item.run.lr, item.run.seed]
            rows.append(start + [record[key] for key in fields[3:]])
            rows[-1] += [record["memory"].get(layer, {}).get(kind) for layer, kind in columns]
    _write_csv(path, [*fields, *(f"{kind}_{layer}" for layer, kind in columns)], rows)


def _write_csv(path: Path, fields: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(fields)
    writer.writerows(rows)
    write_whole(path, text.getvalue().encode())
