"""Processes that stay up over many distributed tests: importing Megatron costs more than a test."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 120


class Workers:
    """`size` ranks of one gloo process group; `run` calls a function on all of them and collects its results."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, self._folder.name, theirs), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(*arguments)` on every rank; results by rank.

        Raises:
            RuntimeError: one failed, died or gave no answer in time; the processes are ended then, because the
                others may wait for it for ever.
        """
        for rank, connection in enumerate(self._connections):
            try:
                connection.send((function, arguments))
            except BrokenPipeError:
                self._fail(f"rank {rank} died before")
        results: dict[int, Any] = {}
        while len(results) < self.size:
            waiting = [connection for rank, connection in enumerate(self._connections) if rank not in results]
            ready = wait(waiting, TIMEOUT_SECONDS)
            if not ready:
                self._fail(f"no answer from ranks {sorted(set(range(self.size)) - set(results))}")
            for connection in ready:
                rank = self._connections.index(connection)  # type: ignore[arg-type]
                try:
                    succeeded, results[rank] = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    self._fail(f"rank {rank} died")
                if not succeeded:
                    self._fail(f"rank {rank}:\n{results[rank]}")
        return [results[rank] for rank in range(self.size)]

    def _fail(self, message: str) -> None:
        self.close()
        raise RuntimeError(message)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)


def _serve(rank: int, size: int, folder: str, connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{Path(folder) / 'rendezvous'}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    while True:
        try:
            function, arguments = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            connection.send((True, function(*arguments)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
