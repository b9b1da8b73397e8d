"""Attempts at a stage: `logs/JOB-restart-N/` (on this machine `logs/local-N/`) with a log and an exit code a rank."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from megatron_palimpsa.training.exit_codes import ExitCode

_GOOD = {int(ExitCode.COMPLETE), int(ExitCode.SAVED_AND_STOPPED)}
_LAUNCH_LINE = re.compile(r"^\S+ \S+ launch: (.*)$")


@dataclass(frozen=True)
class Attempt:
    """The logs of one attempt."""

    folder: Path

    def log(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.log"

    def exit_codes(self) -> dict[int, int]:
        """Of the ranks that noted one; a rank that was killed has none."""
        found = {}
        for path in self.folder.glob("rank-*.exit"):
            text = path.read_text().strip()
            if text.isdecimal():
                found[int(path.stem.removeprefix("rank-"))] = int(text)
        return found

    def bad_rank(self) -> int | None:
        """The first rank that ended otherwise than complete, or saved and stopped."""
        return min((rank for rank, code in self.exit_codes().items() if code not in _GOOD), default=None)

    def last_error(self) -> str | None:
        """What the first bad rank said last."""
        rank = self.bad_rank()
        if rank is None:
            return None
        lines = [line for line in read_text(self.log(rank)).splitlines() if line.strip()]
        errors = [line for line in lines if "rror: " in line]
        return f"rank {rank}: {(errors or lines or ['(its log is empty)'])[-1].strip()}"


def attempts(stage_folder: Path) -> list[Attempt]:
    """From the first to the newest."""
    found = [path for path in (stage_folder / "logs").glob("*-*/") if path.name.rpartition("-")[2].isdecimal()]
    # They follow each other: the newest is the last in which a file was made.
    return [Attempt(path) for path in sorted(found, key=lambda path: path.stat().st_mtime_ns)]


def newest_attempt(stage_folder: Path) -> Attempt | None:
    found = attempts(stage_folder)
    return found[-1] if found else None


def last_words(log: Path) -> str | None:
    """The last thing that a batch script said of itself in its log."""
    said = [match[1] for line in read_text(log).splitlines() if (match := _LAUNCH_LINE.match(line))]
    return said[-1] if said else None


def read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
