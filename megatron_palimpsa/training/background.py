"""Work in a thread of its own, asked after from time to time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum
from typing import TypeVar

T = TypeVar("T")


class Status(IntEnum):
    """Higher wins where ranks differ."""

    DONE = 0
    RUNNING = 1
    FAILED = 2


class Background[T]:
    """A started piece of work; it must not touch process groups, which belong to the main thread."""

    def __init__(self, work: Callable[[threading.Event], T]) -> None:
        """`work` gets an event that is set when its result is of no use any more."""
        self.result: T | None = None
        self.error: BaseException | None = None
        self._done = False
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[threading.Event], T]) -> None:
        try:
            self.result = work(self._cancelled)
            self._done = True
        except BaseException as error:  # whatever it is, the main thread reports it
            self.error = error

    @property
    def status(self) -> Status:
        if self._thread.is_alive():
            return Status.RUNNING
        return Status.DONE if self._done else Status.FAILED

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join()

    def cancel(self) -> None:
        """Ask it to end and wait until it has."""
        self._cancelled.set()
        self._thread.join()
