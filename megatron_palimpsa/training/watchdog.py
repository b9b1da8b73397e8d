"""A watchdog against hangs: ranks that wait for each other for ever tell where they are, and end."""

from __future__ import annotations

import faulthandler
import signal
import sys
from types import TracebackType

GRACE = 15.0
"""Seconds between the stacks and the end. The first rank to end makes a launcher kill the others, which must have
written theirs by then."""


class Watchdog:
    """Ends the process when no `beat` has come for `seconds`, after writing all threads' stacks to standard error.

    Both work while Python's interpreter is stuck in a collective or a kernel: a thread of faulthandler's that needs no
    interpreter lock writes the stacks, and SIGALRM, which nobody catches, kills. None never ends anything.
    """

    def __init__(self, seconds: float | None, grace: float = GRACE) -> None:
        self._seconds = seconds
        self._grace = grace

    def __enter__(self) -> Watchdog:
        if self._seconds is not None:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            self.beat()
        return self

    def beat(self) -> None:
        """Something has got done: the time counts anew from here."""
        if self._seconds is not None:
            faulthandler.dump_traceback_later(self._seconds, file=sys.stderr)
            signal.setitimer(signal.ITIMER_REAL, self._seconds + self._grace)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._seconds is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.cancel_dump_traceback_later()
