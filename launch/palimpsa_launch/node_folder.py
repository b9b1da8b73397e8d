"""A folder on the node's own disk for what its ranks compile: gone when the job's part on the node has ended.

A network file system would have the nodes race for the files, and be slow. What killed jobs have left is removed by
`python -m palimpsa_launch.node_folder PLACE`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = f"megatron-palimpsa-{os.getuid()}-"
_LOCK = "lock"


def place(wanted: str, environment: Mapping[str, str]) -> Path:
    """The folder to make ours in: the one wanted, or what the cluster says is the node's, or /tmp."""
    return Path(wanted or environment.get("SLURM_TMPDIR") or environment.get("TMPDIR") or "/tmp")


@contextmanager
def node_folder(parent: Path) -> Iterator[Path]:
    """A new folder that nobody else can read; it is removed at the end, and so are those that killed jobs have left."""
    sweep(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        with (folder / f"new-{_LOCK}").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Only from here on may somebody else try the lock.
            (folder / f"new-{_LOCK}").rename(folder / _LOCK)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Remove this user's folders whose job is gone: its lock is free."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sweep(place(sys.argv[1], os.environ))
