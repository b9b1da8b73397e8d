"""Numbers of one stage, read from its run folder; nothing here needs torch or matplotlib."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.training.metrics import read_records
from megatron_palimpsa.training.run_folder import RunFolder

Record = dict[str, Any]


@dataclass(frozen=True)
class StageRecords:
    """A stage's metrics by kind, in the order of their steps."""

    name: str
    train: list[Record]
    valid: list[Record]
    end: Record
    resumes: int


@dataclass(frozen=True)
class StageSummary:
    """One row of the report's table.

    `tokens_per_second` counts the time inside training steps only; losses are nats a token.
    """

    stage: str
    steps: int
    tokens: int
    tokens_per_second: float
    loss_before: float
    loss_after: float
    peak_memory_bytes: int
    resumes: int

    def to_dict(self) -> Record:
        return asdict(self)


def read_stage(folder: Path) -> StageRecords:
    """Read a complete stage's `metrics.jsonl`.

    Raises:
        ConfigError: the stage is not complete or its records lack what the report shows.
    """
    run = RunFolder(folder)
    if run.read_marker() is None:
        raise ConfigError(f"{folder}: the stage is not complete (no {run.marker.name}); nothing to report yet")
    records = read_records(run.metrics)
    kinds = {kind: [item for item in records if item["kind"] == kind] for kind in ("train", "valid", "resume", "end")}
    for kind in ("train", "valid", "end"):
        if not kinds[kind]:
            raise ConfigError(f"{run.metrics}: holds no {kind!r} record")
    return StageRecords(folder.name, kinds["train"], kinds["valid"], kinds["end"][-1], len(kinds["resume"]))


def summarize(stage: StageRecords) -> StageSummary:
    """The stage's row: its first and last validation, its `end` record and the rate over all of its training."""
    return StageSummary(
        stage=stage.name,
        steps=stage.end["step"],
        tokens=stage.end["tokens"],
        tokens_per_second=_mean_rate(stage.train),
        loss_before=stage.valid[0]["loss"],
        loss_after=stage.valid[-1]["loss"],
        peak_memory_bytes=stage.end["peak_memory_bytes"],
        resumes=stage.resumes,
    )


def _mean_rate(train: list[Record]) -> float:
    """Tokens over seconds: each record's rate holds for the tokens since the one before it."""
    seconds, before = 0.0, 0
    for record in train:
        seconds += (record["tokens"] - before) / record["tokens_per_second"]
        before = record["tokens"]
    return before / seconds
