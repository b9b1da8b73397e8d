"""Records appended to a file one at a time, so that what was measured stays; by its ending CSV or JSON lines."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_palimpsa.bench.record import MEASURED, Record, layers_text
from megatron_palimpsa.config import ConfigError

_CHANGES = {*MEASURED, "status", "parameters", "estimate_bytes"}
"""Fields that a measurement, or another version of the estimate, changes: the others say what was measured."""
_LISTS = ("losses", "grad_norms")
_TEXT = ("case", "stage", "overrides")
_VERSIONS = ("torch", "triton", "megatron_core", "deepspeed")
"""These, or None. None of both is a number, whatever it looks like in a CSV: 3.10 is not 3.1."""


class RecordFile:
    """What is there may be of earlier runs.

    Args:
        columns: the records' keys.

    Raises:
        ConfigError: the path has neither ending, or is a CSV with other columns.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        if path.suffix not in (".jsonl", ".csv"):
            raise ConfigError(f"--output {path}: must end with .jsonl or .csv")
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".csv" and path.exists():
            with path.open(newline="") as file:
                there = next(csv.reader(file), None)
            if there not in (None, list(columns)):
                raise ConfigError(f"--output {path}: has other columns than are to be written; name another file")

    def write(self, record: Record) -> None:
        with self._path.open("a", newline="") as file:
            if self._path.suffix == ".jsonl":
                file.write(json.dumps(record, allow_nan=False) + "\n")
                return
            flat = _flat(record)
            writer = csv.DictWriter(file, flat, lineterminator="\n")
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(flat)

    def read(self) -> list[Record]:
        """From the first to the newest.

        Raises:
            ConfigError: something else than records stands there.
        """
        if not self._path.exists():
            return []
        try:
            with self._path.open(newline="") as file:
                if self._path.suffix == ".jsonl":
                    return [json.loads(line) for line in file]
                return [_unflat(row) for row in csv.DictReader(file, strict=True)]
        except (ValueError, KeyError, TypeError, csv.Error) as error:
            raise ConfigError(
                f"--output {self._path}: holds something else than records ({error}); a line that was cut off can be "
                "taken out, or name another file"
            ) from None


def measured_before(known: Record, wanted: Sequence[str], records: Sequence[Record]) -> Record | None:
    """The newest of the records that is of the same case in the same surroundings.

    Args:
        wanted: fields that a record of a case that ran has to have.
    """
    same = (record for record in reversed(records) if _identity(record) == _identity(known))
    return next((r for r in same if r["status"] != "ok" or all(r[field] is not None for field in wanted)), None)


def _identity(record: Record) -> dict[str, str]:
    return {key: text for key, text in _flat(record).items() if key not in _CHANGES}


def _flat(record: Record) -> dict[str, str]:
    """Every field as a CSV has it."""
    lists = {key: " ".join(map(repr, record[key] or ())) for key in _LISTS if key in record}
    texts = {key: "" if value is None else str(value) for key, value in record.items()}
    return texts | lists | {"layers": layers_text(record)}


def _unflat(row: dict[str, str]) -> Record:
    record: Record = {key: _value(text) for key, text in row.items()}
    record |= {key: row[key] for key in _TEXT} | {key: row[key] or None for key in _VERSIONS}
    for key in _LISTS:
        record[key] = [float(number) for number in row[key].split()] or None
    words = row["layers"].split()
    record["layers"] = {symbol: int(count) for count, symbol in zip(words[::2], words[1::2], strict=True)}
    return record


def _value(text: str) -> Any:
    """None, a truth value, a number or the text itself."""
    known = {"": None, "True": True, "False": False}
    if text in known:
        return known[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
