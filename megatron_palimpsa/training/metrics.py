"""Records of a run: JSON lines (the account that other tools read) and TensorBoard."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


class MetricsFile:
    """`metrics.jsonl`: one flushed line a record; what lies beyond the step resumed from is dropped on opening.

    Kinds: `train` each log interval, `valid` each evaluation, `resume`, `end`; `RunLog` writes them. Numbers that are
    not finite become null.
    """

    def __init__(self, path: Path, resumed_step: int | None) -> None:
        """`resumed_step` None: the stage starts anew and so does the file."""
        kept = [] if resumed_step is None else _records_until(path, resumed_step)
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text("".join(kept))
        temporary.replace(path)
        self._file = path.open("a")

    def write(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps(_finite({"kind": kind} | values), allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Force the records to disk: a checkpoint must not outlive the records of its steps."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """All whole records; what a kill cut short or a crash of the machine garbled is left out."""
    if not path.exists():
        return []
    whole_lines = path.read_bytes().split(b"\n")[:-1]
    return [record for line in whole_lines if (record := _record(line)) is not None]


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and record.keys() >= {"kind", "step"} else None


def _records_until(path: Path, step: int) -> list[str]:
    # An `end` written by a run that was killed before its marker was not the end.
    records = (record for record in read_records(path) if record["step"] <= step and record["kind"] != "end")
    return [json.dumps(record) + "\n" for record in records]


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value


class TensorBoard:
    """The scalars of the records as TensorBoard curves; points beyond the step resumed from are purged."""

    def __init__(self, folder: Path, resumed_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=0 if resumed_step is None else resumed_step + 1)

    def write(self, kind: str, **values: Any) -> None:
        step = values["step"]
        for name, value in flatten_scalars(values):
            self._writer.add_scalar(f"{kind}/{name}", value, step)
        self._writer.flush()

    def sync(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def flatten_scalars(values: dict[str, Any]) -> list[tuple[str, float]]:
    """Curves of a record: nested mappings become `outer/inner`; a loss by position becomes one curve a bucket."""
    scalars: list[tuple[str, float]] = []
    if "loss_by_position" in values:
        buckets = zip(values["position_edges"][1:], values["loss_by_position"], strict=True)
        values = {key: item for key, item in values.items() if key not in ("position_edges", "loss_by_position")}
        values["loss_before_position"] = {str(edge): loss for edge, loss in buckets}
    for name, value in values.items():
        if isinstance(value, dict):
            scalars += [(f"{name}/{inner}", number) for inner, number in flatten_scalars(value)]
        elif isinstance(value, int | float) and name != "step":
            scalars.append((name, value))
    return scalars
