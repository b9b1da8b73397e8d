"""One process a shard: an advisory lock that the kernel drops when its holder dies, however it dies.

Where a file system knows no such locks the shard is written without: every process writes files of its own, and the
same input gives the same bytes, so two that write one shard may stop each other but never mix their bytes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


class BusyError(Exception):
    """Another process holds the lock; the message says which."""


def this_process() -> str:
    """Host and process id, as lock files and temporary files name them."""
    return f"{socket.gethostname()}-{os.getpid()}"


@contextlib.contextmanager
def lock(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold the lock file `path`, which says by whom and goes when the lock does.

    A lock file whose holder was killed stays and is taken over.

    Raises:
        BusyError: another process holds it and `wait` is false.
    """
    descriptor = _acquire(path, wait)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before the lock goes: whoever waits for it finds the name gone and makes it anew
        os.close(descriptor)


def holder(path: Path) -> str | None:
    """Host and process id of who holds the lock file, as far as one can tell without taking the lock; else None."""
    try:
        name = path.read_text()
    except OSError:
        return None
    host, _, process = name.rpartition("-")
    if host == socket.gethostname() and process.isdigit() and not _is_running(int(process)):
        return None
    return name or None


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _acquire(path: Path, wait: bool) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _flock(descriptor, path, wait)
            if _is_at(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, this_process().encode())
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _flock(descriptor: int, path: Path, wait: bool) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise BusyError(f"{path.name} is held by {holder(path) or 'another process'}") from None
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one of that name: its former holder takes the name away."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    here = os.fstat(descriptor)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
