"""How the ranks of a launch learn that one of them gave up, while they may be waiting for it in a collective."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from megatron_palimpsa import launcher

_GIVEN_UP, _HEARD = "bench/given-up", "bench/heard"
_FOR_EVER, _FOR_RANK_0 = timedelta(days=30), timedelta(minutes=1)


class Alarm:
    """Once any rank sounds it every rank's process ends, rank 0's first; a thread listens beside the main one.

    It goes over connections of its own to the launcher's store: process groups belong to the main thread.
    """

    def __init__(self, end: Callable[[int, int], None]) -> None:
        """
        Args:
            end: called on each rank with the rank that gave up and the number that it gave, before the process ends
                with exit code 1.
        """
        self._end = end
        self._ending = threading.Lock()
        threading.Thread(target=self._listen, name="alarm", daemon=True).start()

    def sound(self, number: int) -> NoReturn:
        """This rank gives up."""
        store = self._store()
        store.set(_GIVEN_UP, f"{launcher.rank()} {number}")
        self._finish(store)

    def _listen(self) -> None:
        try:
            store = self._store()
            store.wait([_GIVEN_UP], _FOR_EVER)
        except dist.DistError:
            return  # The store has gone, and with it the run.
        self._finish(store)

    def _finish(self, store: dist.Store) -> NoReturn:
        self._ending.acquire()  # By one thread, and never released.
        try:
            rank, number = map(int, store.get(_GIVEN_UP).split())
            if launcher.rank() == 0:
                self._end(rank, number)
                store.set(_HEARD, "")
            else:
                # A launcher ends all ranks with the first.
                store.wait([_HEARD], _FOR_RANK_0)
                self._end(rank, number)
        finally:
            launcher.end_at_once(1)

    @staticmethod
    def _store() -> dist.Store:
        return dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=_FOR_EVER,
        )
