"""What a run leaves in its folder: a checkpoint while it is trained, then its result; nothing here needs torch.

A run's records are a list, one an epoch. They lie in the checkpoint's own file, so that weights and records are always
of the same epoch, and in `result.json` once the run is finished.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.experiments.mqar.config import Lesson, SweepConfig
from megatron_palimpsa.experiments.mqar.files import lock, write_whole

Record = dict[str, Any]
"""Of an epoch: lesson, length, pairs, epoch (both from 0), train_loss, accuracy, loss, memory, tokens, seconds."""


@dataclass(frozen=True)
class Run:
    """One model, one learning rate, one seed."""

    config: SweepConfig
    lr: float
    seed: int

    @property
    def folder(self) -> Path:
        return self.config.folder / f"lr-{self.lr!r}-seed-{self.seed}"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.safetensors"

    @property
    def result(self) -> Path:
        return self.folder / "result.json"

    @property
    def name(self) -> str:
        return f"{self.config.name} lr {self.lr!r} seed {self.seed}"

    def locked(self) -> AbstractContextManager[bool]:
        """Whether this process has the run to itself."""
        return lock(self.folder, wait=False)


def runs_of(config: SweepConfig) -> list[Run]:
    """All of a sweep, a seed's learning rates one after the other."""
    return [Run(config, lr, seed) for seed in config.sweep.seeds for lr in config.sweep.lrs]


def read_result(run: Run) -> dict[str, Any] | None:
    """What a finished run noted; None while it is not finished.

    Raises:
        ConfigError: the file is not readable, or of another run.
    """
    try:
        result = json.loads(run.result.read_text())
        records = list(result["records"])
        of = result["model"], result["lr"], result["seed"]
        if of != (run.config.name, run.lr, run.seed):
            raise ValueError("it is of {} lr {} seed {}".format(*of))
        _check_records(run.config, records)
        if next_epoch(run.config, records) is not None:
            raise ValueError(f"its {len(records)} epochs are not all of them")
        return {**result, "records": records}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{run.result}: not readable as a run's result ({_reason(error)}); remove it to train the run again"
        ) from None


def read_records(run: Run) -> list[Record]:
    """The epochs so far, of a run finished or not.

    Raises:
        ConfigError: result or checkpoint is damaged.
    """
    result = read_result(run)
    if result is not None:
        return result["records"]
    try:
        with run.checkpoint.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, run.checkpoint.stat().st_size)))
        records = list(json.loads(header["__metadata__"]["records"]))
        if not records:
            raise ValueError("it has no epoch")
        _check_records(run.config, records)
    except FileNotFoundError:
        # Finished in this moment, or not begun.
        return (read_result(run) or {"records": []})["records"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
        raise ConfigError(
            f"{run.checkpoint}: not readable as a run's checkpoint ({_reason(error)}); remove it to train the run again"
        ) from None
    return records


def _reason(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def _check_records(config: SweepConfig, records: Sequence[Record]) -> None:
    """Refuse what is not the curriculum's epochs from the first on.

    Raises:
        ValueError, TypeError, KeyError: says which epoch.
    """
    for number, record in enumerate(records):
        place = next_epoch(config, records[max(number - 1, 0) : number])
        if place is None or (record["lesson"], record["epoch"]) != place:
            raise ValueError(f"epoch {number + 1} of its records is not one that follows in the curriculum")
        lesson = config.curriculum[place[0]]
        numbers = [record[key] for key in ("accuracy", "tokens", "seconds")]
        numbers += [record[key] for key in ("train_loss", "loss") if record[key] is not None]
        if (record["length"], record["pairs"]) != (lesson.length, lesson.pairs) or not all(map(math.isfinite, numbers)):
            raise ValueError(f"epoch {number + 1} of its records has other sizes than its lesson, or no numbers")
        dict(record["memory"])


def write_result(run: Run, result: dict[str, Any]) -> None:
    """Appears whole or not at all; the checkpoint has served its purpose then."""
    write_whole(run.result, (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())
    run.checkpoint.unlink(missing_ok=True)


def lesson_is_over(lesson: Lesson, record: Record, stop_at_accuracy: float | None) -> bool:
    """Whether the epoch of `record` was the lesson's last."""
    early = stop_at_accuracy is not None and record["accuracy"] > stop_at_accuracy
    return early or record["epoch"] + 1 == lesson.epochs


def next_epoch(config: SweepConfig, records: Sequence[Record]) -> tuple[int, int] | None:
    """-> number of the lesson and of the epoch in it that follow; None behind the last, or where the run diverged."""
    if not records:
        return 0, 0
    last = records[-1]
    if has_diverged(last):
        return None
    number = last["lesson"]
    if not lesson_is_over(config.curriculum[number], last, config.train.stop_at_accuracy):
        return number, last["epoch"] + 1
    return (number + 1, 0) if number + 1 < len(config.curriculum) else None


def has_diverged(record: Record) -> bool:
    """Whether a loss of the epoch was not finite; such a run is not continued."""
    return record["train_loss"] is None or record["loss"] is None


def epoch_tokens(config: SweepConfig, lesson: Lesson) -> int:
    """Tokens trained on in an epoch of the lesson."""
    return config.train.examples // lesson.batch_size * lesson.batch_size * lesson.length


def tokens_left(run: Run, records: Sequence[Record]) -> int:
    """That the rest of a run trains on, where no lesson ends early."""
    place = next_epoch(run.config, records)
    if place is None:
        return 0
    first, epoch = place
    lessons = run.config.curriculum[first:]
    return sum(lesson.epochs * epoch_tokens(run.config, lesson) for lesson in lessons) - epoch * epoch_tokens(
        run.config, lessons[0]
    )
