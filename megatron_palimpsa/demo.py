"""`make demo`: prepare text, train the three stages, report; finished parts are kept, a cut one goes on where it was.

Every part is a process of its own that ends with this one. Nothing here imports torch, so that a finished demo says
so at once.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from palimpsa_launch import stages

from megatron_palimpsa.config import ConfigError, load_stage
from megatron_palimpsa.engine.installed import require_engine
from megatron_palimpsa.lifeline import answering_signals, tied_process
from megatron_palimpsa.report.table import format_table
from megatron_palimpsa.report.write import is_current, summaries
from megatron_palimpsa.training.console import clock
from megatron_palimpsa.training.exit_codes import ExitCode
from megatron_palimpsa.training.metrics import read_records
from megatron_palimpsa.training.run_folder import RunFolder

_RECIPES = ("demo/continue-pretraining", "demo/long-context", "demo/instruct")
_MODULE = "megatron_palimpsa"
_RECIPE_FOLDER = Path("runs/demo")
_SHOW_EVERY = 15.0
_LOCK_PATIENCE = 20.0


@dataclass(frozen=True)
class Part:
    """One command of the demo."""

    title: str
    command: tuple[str, ...]
    seconds: float
    """Measured on two cores: the part's share of the whole, corrected by how fast this machine turns out to be."""
    stage: RunFolder | None = None
    total_steps: int = 0

    @property
    def is_done(self) -> bool:
        """A stage by its marker alone; the other parts look for themselves what is left to do."""
        return self.stage is not None and self.stage.marker.exists()

    def fraction_done(self) -> float:
        """Of a stage, by its records; other parts are short."""
        if self.is_done:
            return 1.0
        if self.stage is None:
            return 0.0
        steps = [record["step"] for record in read_records(self.stage.metrics)]
        return max(steps, default=0) / self.total_steps


def run(folder: Path, engine: str = "megatron") -> int:
    """Do whatever of the demo is not done yet in `folder`, training under `engine`; -> exit code.

    Raises:
        ConfigError: another demo runs there, or something the demo needs is wrong or missing.
    """
    with _only_one(folder) as lock:
        if not _is_finished(folder):
            start = time.monotonic()
            code = _run_parts(_parts(folder, engine), lock)
            if not code:
                print(f"The demo is finished after {clock(time.monotonic() - start)}; all of it is in {folder}.")
            return code
    print(f"The demo in {folder} is finished; remove that folder to run it again.\n")
    print(f"{format_table(summaries(folder))}\n\nReport with pictures: {folder / 'report' / 'report.md'}")
    return ExitCode.COMPLETE


def _is_finished(folder: Path) -> bool:
    trained = all((folder / Path(name).name / "STAGE_COMPLETE").exists() for name in _RECIPES)
    return trained and is_current(folder)


def _parts(folder: Path, engine: str) -> list[Part]:
    data = Part("text", ("prep", "demo", "--folder", str(folder / "data")), 20)
    report = Part("report", ("report", str(folder)), 9)
    seconds = (141, 109, 72)
    return [data, *(_stage(name, folder, engine, share) for name, share in zip(_RECIPES, seconds, strict=True)), report]


def _stage(name: str, folder: Path, engine: str, seconds: float) -> Part:
    recipe = stages.path(name)
    config = load_stage(recipe, [f"parallel.engine={engine}"])
    require_engine(config)
    moved = {"output_dir": config.output_dir}
    moved |= {f"data.{key}": getattr(config.data, key) for key in ("tokenizer", "train_blend", "valid_blend")}
    overrides = [
        f"{key}={json.dumps(str(folder / Path(value).relative_to(_RECIPE_FOLDER)))}" for key, value in moved.items()
    ]
    overrides.append(f"parallel.engine={engine}")
    run_folder = RunFolder(folder / config.name)
    return Part(config.name, ("train", str(recipe), *overrides), seconds, run_folder, config.total_steps)


def _run_parts(parts: Sequence[Part], lock: int) -> int:
    progress = _Progress(parts)
    for number, part in enumerate(parts, 1):
        if part.is_done:
            print(f"[{number}/{len(parts)}] {part.title}: done before", flush=True)
            continue
        print(f"[{number}/{len(parts)}] {part.title} ({progress.text(part)})", flush=True)
        code = _run_part(part, progress, lock)
        if code:
            return code
    return ExitCode.COMPLETE


def _run_part(part: Part, progress: _Progress, lock: int) -> int:
    # Measured: so small a model trains 15 % slower on two threads, and far slower where another program wants a core.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with (
        tied_process(_MODULE, part.command, environment, keep_open=[lock]) as process,
        _passing_signals_to(process) as received,
    ):
        while True:
            try:
                code = process.wait(timeout=_SHOW_EVERY)
                break
            except subprocess.TimeoutExpired:
                print(f"demo: {progress.text(part)}", flush=True)
    progress.finished(part)
    if received:
        print("demo: stopped; the same command goes on from here", flush=True)
        return ExitCode.SAVED_AND_STOPPED
    if code < 0:
        name = signal.Signals(-code).name
        print(f"demo: {part.title} was ended by {name}; the same command goes on where it was", flush=True)
        return 128 - code
    if code:
        print(f"demo: {part.title} ended with exit code {code}; its last lines say why", flush=True)
    return code


class _Progress:
    """How much of the whole is done and about how long the rest takes."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._finished = {part.title for part in parts if part.is_done}
        self._start = time.monotonic()
        self._done_before = self._done()

    def finished(self, part: Part) -> None:
        self._finished.add(part.title)

    def text(self, current: Part) -> str:
        whole = sum(part.seconds for part in self._parts)
        done = self._done()
        elapsed, expected = time.monotonic() - self._start, done - self._done_before
        # The first few seconds say little about how fast this machine is: one minute at the expected pace is assumed.
        pace = (elapsed + 60) / (expected + 60)
        return f"{100 * done / whole:.0f} % of the demo done, about {clock(pace * (whole - done))} left"

    def _done(self) -> float:
        return sum(
            part.seconds * (1.0 if part.title in self._finished else part.fraction_done()) for part in self._parts
        )


@contextmanager
def _passing_signals_to(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Ctrl-C and its like ask the child to save and stop, a second one kills it; -> the signals received."""
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            print("\ndemo: stopping after the present step; once more stops at once", flush=True)
            process.send_signal(signal.SIGTERM)
        else:
            process.kill()

    with answering_signals(forward):
        yield received


@contextmanager
def _only_one(folder: Path) -> Iterator[int]:
    """Hold the folder's lock; -> its descriptor, which the parts inherit, so that it is free only when they are gone.

    A demo that was killed leaves a part behind for a moment: that is waited for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".demo.lock").open("a+") as file:
        deadline = time.monotonic() + _LOCK_PATIENCE
        while not _locks(file):
            if time.monotonic() > deadline:
                file.seek(0)
                raise ConfigError(f"{folder}: another demo runs there (process {file.read().strip()})")
            time.sleep(0.2)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield file.fileno()


def _locks(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
