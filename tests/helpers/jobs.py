"""Small preparation jobs, and processes that are killed while they run one."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from palimpsa_data.documents import Document, Example, Item, Skipped
from palimpsa_data.plan import PrepJob
from palimpsa_data.sources import FineWebOptions, find_inputs

from helpers.bpe import unicode_text, write_tokenizer
from helpers.data_fixtures import fineweb_row, write_fineweb

DUMPS = ("CC-MAIN-2019-04", "CC-MAIN-2024-10")


def write_inputs(folder: Path, files: int = 2, rows: int = 40) -> Path:
    """FineWeb-shaped parquet files of random text with a null and an empty row each; -> their folder."""
    draw = random.Random(files * rows)
    for number in range(files):
        texts = [unicode_text(draw) or "x" for _ in range(rows - 2 + number)]
        rows_here = [fineweb_row(text, dump=draw.choice(DUMPS)) for text in [*texts, None, ""]]
        write_fineweb(folder / f"train-{number:05d}.parquet", rows_here)
    return folder


def fineweb_job(folder: Path, output: str = "out", **changes: Any) -> PrepJob:
    """A job over FOLDER/in, which is written where it is not there, with FOLDER/tokenizer.json."""
    inputs = folder / "in"
    if not inputs.exists():
        write_inputs(inputs)
    settings = {
        "kind": "fineweb",
        "inputs": find_inputs([str(inputs)]),
        "options": FineWebOptions(),
        "tokenizer": write_tokenizer(folder),
        "output": folder / output,
    }
    return PrepJob(**{**settings, **changes})


def read_examples(source: Any, options: Any, progress: Callable[[int], None]) -> Iterator[Item]:
    """A `PrepJob.read`: whatever the file holds, examples and documents in turn."""
    for number in range(20):
        yield Example("ask: ", "c" * number, "\nanswer: ", "yes" * number, source.stem)
        yield Document(f"document {number}", source.stem)
    yield Skipped("not wanted")
    yield Document("half a pair \ud800", source.stem)


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def killed(target: Callable[..., Any], *args: Any, after: float | None = None) -> bool:
    """Run in a forked child, killed `after` so many seconds; whether SIGKILL ended it (False: it came to its end)."""
    child = multiprocessing.get_context("fork").Process(target=target, args=args)
    child.start()
    child.join(60 if after is None else after)
    if after is not None and child.is_alive():
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join(60)
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode == -signal.SIGKILL


def die_at(call: int, action: Callable[[], Any]) -> None:
    """Do `action`, dying before the `call`-th step that opens, flushes, renames or removes a file."""
    steps = 0

    def counted(function: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return step

    paths = ("replace", "unlink", "write_bytes", "open", "mkdir")
    for owner, name in [(os, "fsync"), (os, "open"), (os, "ftruncate"), *((Path, name) for name in paths)]:
        setattr(owner, name, counted(getattr(owner, name)))
    action()
