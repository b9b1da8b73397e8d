"""Processes that stay up over many distributed tests: importing Megatron costs more than a test."""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_palimpsa import parallel

TIMEOUT_SECONDS = 240
_PRELOADED = ["megatron.core.models.hybrid.hybrid_model", "megatron.core.optimizer", "megatron.core.dist_checkpointing"]


class Workers:
    """`size` processes, from the first call on: `run` calls a function on all of them as ranks of one process group.

    `run_on` takes some of them. The group is NCCL's where CUDA exists and gloo's otherwise, formed for the call and
    left after it: nothing of one test's groups remains for the next.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._calls = 0
        self._folder = tempfile.TemporaryDirectory()
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def _start(self) -> None:
        context = _context()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)  # type: ignore[attr-defined]
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`run_on` all processes."""
        return self.run_on(self.size, function, *arguments)

    def run_on(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(*arguments)` on ranks 0 to `size` - 1 of a process group of that size; results by rank.

        Raises:
            RuntimeError: one failed, died or gave no answer in time; the processes are ended then, because the
                others may wait for it for ever, and started anew for the next call.
        """
        if not self._processes:
            self._start()
        self._calls += 1
        rendezvous = Path(self._folder.name) / f"rendezvous-{self._calls}"
        for rank, connection in enumerate(self._connections[:size]):
            try:
                connection.send((rendezvous, size, function, arguments))
            except BrokenPipeError:
                self._fail(f"rank {rank} died before")
        results: dict[int, Any] = {}
        while len(results) < size:
            waiting = [connection for rank, connection in enumerate(self._connections[:size]) if rank not in results]
            ready = wait(waiting, TIMEOUT_SECONDS)
            if not ready:
                self._fail(f"no answer from ranks {sorted(set(range(size)) - set(results))}")
            for connection in ready:
                rank = self._connections.index(connection)  # type: ignore[arg-type]
                try:
                    succeeded, results[rank] = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    self._fail(f"rank {rank} died")
                if not succeeded:
                    self._fail(f"rank {rank}:\n{results[rank]}")
        return [results[rank] for rank in range(size)]

    def _fail(self, message: str) -> None:
        self._end()
        raise RuntimeError(message)

    def _end(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._connections, self._processes = [], []

    def close(self) -> None:
        self._end()
        self._folder.cleanup()


class FirstWorkers:
    """The first `size` of kept processes, as if there were no others."""

    def __init__(self, workers: Workers, size: int) -> None:
        self._workers = workers
        self.size = size

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self._workers.run_on(self.size, function, *arguments)


def _context() -> BaseContext:
    if torch.cuda.is_available():
        # CUDA does not survive a fork.
        return multiprocessing.get_context("spawn")
    # Forked from a process that has imported once what takes seconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _serve(rank: int, connection: Connection) -> None:
    # What is imported stays: leaving a group need not look through it for garbage.
    gc.freeze()
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    while True:
        try:
            rendezvous, size, function, arguments = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            with _process_group(rendezvous, rank, size):
                result = function(*arguments)
            connection.send((True, result))
        except BaseException:
            connection.send((False, traceback.format_exc()))


@contextmanager
def _process_group(rendezvous: Path, rank: int, size: int) -> Iterator[None]:
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    yield
    parallel.destroy()
