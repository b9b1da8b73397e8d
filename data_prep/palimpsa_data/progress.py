"""How far a job is: numbers that several processes add to, and the line that shows them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_SECONDS_BETWEEN_LINES = 10.0


class Counters:
    """Rows of numbers, one a process, that the process adds to and the job's first process reads."""

    NAMES = ("read", "reading", "kept", "documents", "tokens", "text_bytes")
    SIZE = len(NAMES)

    def __init__(self, values: Sequence[int], row: int = 0) -> None:
        self._values, self._first = values, row * self.SIZE

    def __setitem__(self, name: str, value: int) -> None:
        self._values[self._first + self.NAMES.index(name)] = value  # type: ignore[index]

    def __getitem__(self, name: str) -> int:
        return self._values[self._first + self.NAMES.index(name)]

    def sums(self) -> dict[str, int]:
        return {name: sum(self._values[place :: self.SIZE]) for place, name in enumerate(self.NAMES)}


@dataclass(frozen=True)
class Progress:
    """Sums over the shards that this call works on; `input_bytes` of `total_bytes` are read."""

    shards: int
    total_shards: int
    input_bytes: int
    total_bytes: int
    documents: int
    tokens: int
    text_bytes: int
    seconds: float

    @property
    def seconds_left(self) -> float | None:
        """At the speed so far; None while that is not known."""
        if not self.input_bytes or not self.total_bytes:
            return None
        return self.seconds * max(self.total_bytes - self.input_bytes, 0) / self.input_bytes

    def line(self) -> str:
        """For people: shards, documents, tokens, MB of text and tokens a second, time left."""
        seconds = max(self.seconds, 1e-9)
        left = "unknown" if self.seconds_left is None else _duration(self.seconds_left)
        return (
            f"shards {self.shards}/{self.total_shards}  documents {self.documents:,}  tokens {self.tokens:,}  "
            f"{self.text_bytes / seconds / 1e6:.1f} MB/s  {_count(self.tokens / seconds)} tokens/s  left {left}"
        )


def console() -> Callable[[Progress], None]:
    """Shows progress on standard error: one line that changes on a terminal, else a line every ten seconds."""
    shown_at = time.monotonic()

    def show(progress: Progress) -> None:
        nonlocal shown_at
        finished = progress.shards == progress.total_shards
        if sys.stderr.isatty():
            print(f"\r\033[K{progress.line()}", end="\n" if finished else "", file=sys.stderr, flush=True)
        elif finished or time.monotonic() - shown_at >= _SECONDS_BETWEEN_LINES:
            shown_at = time.monotonic()
            print(progress.line(), file=sys.stderr, flush=True)

    return show


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def _count(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f}{unit}"
    return f"{number:.0f}"
