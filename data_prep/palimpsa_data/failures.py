"""Shards of a job that could not be written, each reason in full once however many files it is about."""

from __future__ import annotations

_MOST_REASONS = 10
_MOST_NAMED = 20


class Failures:
    """Inputs by what was wrong with them."""

    def __init__(self) -> None:
        self._reasons: dict[str, dict[int, tuple[str, str]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._reasons.values()))

    def add(self, index: int, path: str, error: str) -> str:
        """Keep what was wrong with input `index`; -> the line that says so."""
        same = self._reasons.setdefault(error.replace(path, ""), {})
        same[index] = path, error
        return error if len(same) == 1 else f"{path}: the same"

    def text(self, shards: int) -> str:
        """For people: every reason with the files it is about, in their order; `shards` were to be written."""
        lines = []
        for same in sorted(self._reasons.values(), key=min)[:_MOST_REASONS]:
            (_, error), *others = (same[index] for index in sorted(same))
            lines.append(error)
            if others:
                names = ", ".join(path for path, _ in others[:_MOST_NAMED])
                rest = len(others) - _MOST_NAMED
                lines.append(f"the same: {names}" + (f" and {rest} more" if rest > 0 else ""))
        if len(self._reasons) > _MOST_REASONS:
            lines.append(f"... and {len(self._reasons) - _MOST_REASONS} more reasons")
        others_done = "; the others are done" if len(self) < shards else ""
        return f"{len(self)} of {shards} shards could not be prepared{others_done}:\n" + "\n".join(lines)
