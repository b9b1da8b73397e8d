"""How a sweep's files are written, whatever is killed, full or at work on the same folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Replace `path` by one rename; whoever calls has the folder to itself.

    Raises:
        OSError: names `path`; what was there before stays, and no half of the new one.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise type(error)(error.errno, error.strerror, str(path)) from None


@contextlib.contextmanager
def lock(folder: Path, *, wait: bool) -> Iterator[bool]:
    """Whether this process has the folder, made where there is none, to itself.

    The kernel lets go of the lock however the process ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
