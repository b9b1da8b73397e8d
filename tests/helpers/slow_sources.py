"""Sources that worker processes of tests read: slow, deadly, or neither. A module, so that workers can import it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from palimpsa_data.documents import Document


@dataclass(frozen=True)
class SlowOptions:
    folder: str = field(default="", metadata={"decides": False})


def slowly(source: Any, options: Any, progress: Callable[[int], None]) -> Iterator[Document]:
    (Path(options.folder) / f"{source.stem}.pid").write_text(str(os.getpid()))
    for _ in range(600):
        time.sleep(0.1)
        yield Document("word")


def dies(source: Any, options: Any, progress: Callable[[int], None]) -> Iterator[Document]:
    if source.stem.endswith("1"):
        os.kill(os.getpid(), signal.SIGKILL)
    yield Document(source.stem)


def quickly(source: Any, options: Any, progress: Callable[[int], None]) -> Iterator[Document]:
    yield Document(source.stem)
