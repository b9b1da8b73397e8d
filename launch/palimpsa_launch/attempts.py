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

    @property
    def job(self) -> str | None:
        """SLURM's number; None on this machine."""
        job = self.folder.name.partition("-")[0]
        return None if job == "local" else job

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
        """The rank to blame where one ended otherwise than complete, or saved and stopped.

        The first with an error of its own, else the first that was killed, else the first that lost the others. Killed
        ranks come second because torchrun kills those that wait for one that failed.
        """
        codes = self.exit_codes()
        bad = sorted(rank for rank, code in codes.items() if code not in _GOOD)
        if not bad:
            return None
        own = [rank for rank in bad if not self._lost_the_others(rank)]
        killed = sorted(rank for rank in self._ranks() if rank not in codes)
        return [*own, *killed, *bad][0]

    def last_error(self) -> str | None:
        """What the rank to blame said last."""
        rank = self.bad_rank()
        if rank is None:
            return None
        lines = [line for line in read_text(self.log(rank)).splitlines() if line.strip()]
        if rank not in self.exit_codes():
            return f"rank {rank} was killed or crashed; its log ends: {(lines or ['(empty)'])[-1].strip()}"
        errors = [line for line in lines if "rror: " in line]
        return f"rank {rank}: {(errors or lines or ['(its log is empty)'])[-1].strip()}"

    def _ranks(self) -> list[int]:
        """Those that have a log."""
        names = [path.stem.removeprefix("rank-") for path in self.folder.glob("rank-*.log")]
        return [int(name) for name in names if name.isdecimal()]

    def _lost_the_others(self, rank: int) -> bool:
        """Whether it ended only because another rank had (the message is the command line's)."""
        return f"error: rank {rank} cannot reach the others" in read_text(self.log(rank))


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
