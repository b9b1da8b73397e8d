"""A few processes that take tasks, each over a pipe of its own, and never outlive the process that started them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

_SECONDS_BETWEEN_TICKS = 0.5


class Workers[Task, Result]:
    """`count` processes, each with the function that `start(row, counters, *arguments)` gives it.

    Args:
        row_size: numbers in a process's row of `counters`, which all processes see.
        start: a module's function, called in the process; it and `arguments` are pickled.
    """

    def __init__(self, count: int, row_size: int, start: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy locks that threads of ours may hold
        self.counters: Sequence[int] = context.RawArray("q", count * row_size)
        self._processes: dict[Connection, BaseProcess] = {}
        # Ctrl-C goes to all of them at once and is this process's to handle; they are born with it blocked. The tracker
        # that `multiprocessing` starts first would unblock it.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for row in range(count):
                ours, theirs = context.Pipe()
                task = (theirs, start, (row, self.counters, *arguments))
                process = context.Process(target=_work, args=task, daemon=True)
                process.start()
                theirs.close()
                self._processes[ours] = process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __enter__(self) -> Workers[Task, Result]:
        return self

    def __exit__(self, *exception: object) -> None:
        for pipe, process in self._processes.items():
            pipe.close()
            process.terminate()
            process.join()

    def map(self, tasks: deque[Task], tick: Callable[[], None]) -> Iterator[tuple[Task, Result | str]]:
        """Each task with its result as it comes, or with a few words on how its process ended.

        `tick` is called about twice a second. A process that died is not replaced; when none is left the remaining
        tasks end like the last one did.

        Raises:
            RuntimeError: an exception in a worker, with the worker's traceback.
        """
        working: dict[Connection, Task] = {}
        ended = "before its first task"
        for pipe in list(self._processes):
            self._hand_out(pipe, tasks, working)
        while working:
            ready = wait(list(working), timeout=_SECONDS_BETWEEN_TICKS)
            for pipe in [pipe for pipe in working if pipe in ready]:
                task = working.pop(pipe)
                try:
                    result, error = pipe.recv()
                except (EOFError, ConnectionError):
                    ended = self._bury(pipe)
                    yield task, ended
                    continue
                if error:
                    raise RuntimeError(f"a worker process failed:\n{error}")
                self._hand_out(pipe, tasks, working)
                yield task, result
            tick()
        for task in tasks:
            yield task, ended

    def _hand_out(self, pipe: Connection, tasks: deque[Task], working: dict[Connection, Task]) -> None:
        if not tasks:
            return
        task = tasks.popleft()
        working[pipe] = task
        with contextlib.suppress(ConnectionError):  # it has died; `wait` reports the pipe's end
            pipe.send(task)

    def _bury(self, pipe: Connection) -> str:
        process = self._processes.pop(pipe)
        process.join()
        pipe.close()
        code = process.exitcode or 0
        if code == -signal.SIGKILL:
            return "killed, perhaps for want of memory: fewer processes need less"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _work(pipe: Connection, start: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        work = start(*arguments)
        while True:
            pipe.send((work(pipe.recv()), None))
    except EOFError:
        return
    except Exception:
        pipe.send((None, traceback.format_exc()))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
