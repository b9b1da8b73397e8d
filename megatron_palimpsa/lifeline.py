"""A Python module run in a process that ends with the one that started it, however that one ends.

`python -m megatron_palimpsa.lifeline FD MODULE ARGUMENTS...`: FD is the read end of a pipe whose write end only the
parent holds. The kernel closes it when the parent dies, by SIGKILL too, and this process group then kills itself. It
works on Linux and macOS alike, where a parent-death signal would not.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType


@contextmanager
def tied_process(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], keep_open: Sequence[int] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """Start `python -m MODULE ARGUMENTS...` in its own process group, with this process's output.

    It dies with this process, and at the latest when the context ends. `keep_open` are descriptors it inherits.
    stdin is empty and output unbuffered.
    """
    read_end, write_end = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(read_end), module, *arguments],
            pass_fds=(read_end, *keep_open),
            stdin=subprocess.DEVNULL,
            env={**environment, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
    finally:
        os.close(read_end)
    try:
        yield process
    finally:
        os.close(write_end)
        process.wait()


@contextmanager
def answering_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Ctrl-C and its like, a closed terminal and SIGUSR1 go to `handler`; what they went to before comes back."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _end_with_parent(descriptor: int) -> None:
    os.read(descriptor, 1)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    descriptor, module = int(sys.argv[1]), sys.argv[2]
    os.set_inheritable(descriptor, False)
    threading.Thread(target=_end_with_parent, args=(descriptor,), daemon=True).start()
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
