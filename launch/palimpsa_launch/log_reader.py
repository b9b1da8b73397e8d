"""A file that grows, read bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


class LogReader:
    """What is added to the file at `path`, from byte `offset` on; the file may not be there yet."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self._offset = offset

    def write_rest(self, write: Callable[[str], None]) -> None:
        """Hand over what was added since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return
        self._offset += len(text)
        if text:
            write(text.decode(errors="replace"))
