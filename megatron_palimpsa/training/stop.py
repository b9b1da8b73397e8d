"""When a run stops before its tokens are done: on a signal or a file, at a step, at a token count or by the clock.

A second file asks for a checkpoint without stopping.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from types import FrameType

from megatron_palimpsa import launcher
from megatron_palimpsa.config import TrainConfig

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopReason(IntEnum):
    """Higher wins where ranks differ."""

    NONE = 0
    SAVE = 1
    """No reason to stop: save after the next step and go on."""
    STEP = 2
    TOKENS = 3
    MINUTES = 4
    SIGNAL = 5
    FILE = 6

    def __str__(self) -> str:
        return {
            StopReason.NONE: "",
            StopReason.SAVE: "a checkpoint was asked for",
            StopReason.STEP: "train.stop_at_step reached",
            StopReason.TOKENS: "train.stop_at_tokens reached",
            StopReason.MINUTES: "train.stop_after_minutes reached",
            StopReason.SIGNAL: "stop signal received",
            StopReason.FILE: "stop file found",
        }[self]


class StopControl:
    """Asks at every step boundary whether to save and stop; all ranks get the same answer.

    A signal (SIGTERM, SIGUSR1) that reaches one rank only, or clocks that differ, must not leave the others waiting
    in a collective: the reasons are compared over all ranks. So may only one rank see `file`, which a batch script
    makes because torchrun passes no signal on, and `save_file`, which goes when it is seen.
    """

    def __init__(
        self,
        train: TrainConfig,
        clock: Callable[[], float] = time.monotonic,
        file: Path | None = None,
        save_file: Path | None = None,
    ) -> None:
        self._train = train
        self._file = file
        self._save_file = save_file
        self._clock = clock
        self._start = clock()
        self._signalled = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, a stop signal is noted instead of ending the process.

        One rank of several ignores it afterwards: the first to exit makes torchrun send SIGTERM to the others, which
        are about to exit with a code of their own.
        """
        before = {number: signal.signal(number, self._note) for number in SIGNALS}
        try:
            yield
        finally:
            one_of_several = launcher.world_size() > 1
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if one_of_several else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def reason(self, step: int, tokens: int, agree: Callable[[int], int]) -> StopReason:
        """Why to stop now that `step` steps and `tokens` tokens are done; NONE to go on.

        `agree` gives the largest of the ranks' numbers to all of them: a collective call.
        """
        return StopReason(agree(self._own_reason(step, tokens)))

    def _own_reason(self, step: int, tokens: int) -> StopReason:
        train = self._train
        # One rank asks the shared file system for all.
        if self._file is not None and launcher.rank() == 0 and self._file.exists():
            return StopReason.FILE
        if self._signalled:
            return StopReason.SIGNAL
        if train.stop_after_minutes is not None and self._clock() - self._start >= 60 * train.stop_after_minutes:
            return StopReason.MINUTES
        if train.stop_at_tokens is not None and tokens >= train.stop_at_tokens:
            return StopReason.TOKENS
        if train.stop_at_step is not None and step >= train.stop_at_step:
            return StopReason.STEP
        return StopReason.SAVE if self._takes_save_file() else StopReason.NONE

    def _takes_save_file(self) -> bool:
        if self._save_file is None or launcher.rank() != 0 or not self._save_file.exists():
            return False
        self._save_file.unlink()
        return True
