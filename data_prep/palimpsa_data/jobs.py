"""Running a job: its shards, or a task's part of them, in one process or several, whatever was there before.

Nothing but the file system connects the processes of a job: a shard that is complete is kept, one that another process
works on is passed over and looked at again at the end, every other is written. Any number of calls, on any number of
machines, may work on one output folder.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palimpsa_data import tokenizers
from palimpsa_data.documents import Item
from palimpsa_data.errors import DataError
from palimpsa_data.failures import Failures
from palimpsa_data.files import json_bytes, read_json, require_free_space, write_atomically
from palimpsa_data.locks import BusyError, lock
from palimpsa_data.pipeline import Done, write_input
from palimpsa_data.plan import Plan, PrepJob, ShardInput, plan_of, read_plan, save_plan
from palimpsa_data.progress import Counters, Progress
from palimpsa_data.shards import Manifest, ShardSpec, manifest_path, output_path
from palimpsa_data.workers import Workers

_SECONDS_BETWEEN_REPORTS = 0.5


@dataclass(frozen=True)
class JobResult:
    """Every shard of the call (path without suffix -> manifest), how many of them it wrote, and how long it took."""

    plan: Plan
    shards: dict[Path, Manifest]
    written: int
    seconds: float


def run_job(
    job: PrepJob,
    *,
    shard: tuple[int, int] | None = None,
    processes: int = 1,
    progress: Callable[[Progress], None] = lambda progress: None,
    say: Callable[[str], None] = lambda line: None,
) -> JobResult:
    """Write every shard of the job that is not there, or those of one task.

    Args:
        shard: (i, n): only shards i, i + n, i + 2n, ...: task i of n, counted from 0.
        progress: is called about twice a second.
        say: gets what else is worth a line: which tokenizer backend, whom the job waits for.

    Raises:
        DataError: the job cannot start, or some shards could not be written; the others are then there.
    """
    started = time.monotonic()
    first, step = _checked_share(shard)
    mine = range(first, len(job.inputs), step)
    with contextlib.ExitStack() as stack:
        workers: Workers[tuple[int, bool], Outcome] | None = None
        if min(processes, len(mine)) > 1:  # they load their tokenizers while this process loads its own
            count = min(processes, len(mine))
            workers = stack.enter_context(Workers(count, Counters.SIZE, start_worker, (job,)))
        tokenizer = tokenizers.load(job.tokenizer, backend=job.backend)
        plan = plan_of(job, tokenizer.info)
        save_plan(job.output, plan)
        if tokenizer.note:
            say(tokenizer.note)
        stems = plan.stems(job.output)
        _require_space(job, [index for index in mine if not manifest_path(stems[index]).exists()])
        run = _Run(job, list(mine), started, progress, say)
        if workers is None:
            run.here(plan, tokenizer)
        else:
            run.spread(workers)
    if run.failed:
        raise DataError(run.failed.text(len(mine)))
    done = {stems[index]: run.done[index] for index in mine}
    return JobResult(plan, done, run.written, time.monotonic() - started)


def _checked_share(shard: tuple[int, int] | None) -> tuple[int, int]:
    if shard is None:
        return 0, 1
    index, count = shard
    if not 0 <= index < count:
        raise DataError(f"--shard {index}/{count}: i/n needs 0 <= i < n, tasks are counted from 0")
    return index, count


def _require_space(job: PrepJob, missing: Sequence[int]) -> None:
    # Two bytes a token and some four bytes of text a token; compressed inputs need more than this.
    require_free_space(job.output, sum(job.inputs[index].bytes for index in missing) // 2)


class _Run:
    """One call's shards: those still to do, and what became of the others."""

    def __init__(
        self,
        job: PrepJob,
        mine: list[int],
        started: float,
        progress: Callable[[Progress], None],
        say: Callable[[str], None],
    ) -> None:
        self.done: dict[int, Manifest] = {}
        self.failed = Failures()
        self.written = 0
        self._job, self._mine, self._started = job, mine, started
        self._progress, self._say = progress, say
        self._busy: list[int] = []
        self._reported = 0.0
        # The longest first, so that no process is left with a long one at the end.
        self._order = sorted(mine, key=lambda index: (-job.inputs[index].bytes, index))

    def here(self, plan: Plan, tokenizer: tokenizers.Tokenizer) -> None:
        self._counters = Counters([0] * Counters.SIZE)
        work = ShardWork(self._job, plan, tokenizer, self._counters, self._report)
        for wait in (False, True):
            for index in self._order:
                self._keep(index, work(index, wait))
            self._order, self._busy = self._busy, []
        self._report(force=True)

    def spread(self, workers: Workers[tuple[int, bool], Outcome]) -> None:
        self._counters = Counters(workers.counters)
        for wait in (False, True):
            for task, outcome in workers.map(deque((index, wait) for index in self._order), self._report):
                if isinstance(outcome, str):
                    path = self._job.inputs[task[0]].path
                    outcome = Outcome(error=f"{path}: the process that prepared it ended: {outcome}")
                self._keep(task[0], outcome)
            self._order, self._busy = self._busy, []
        self._report(force=True)

    def _keep(self, index: int, outcome: Outcome) -> None:
        if outcome.busy:
            self._say(f"{outcome.busy}: passed over, looked at again at the end")
            self._busy.append(index)
        elif outcome.manifest is not None:
            self.done[index] = outcome.manifest
            self.written += outcome.written
        else:
            self._say(self.failed.add(index, str(self._job.inputs[index].path), str(outcome.error)))

    def _report(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._reported < _SECONDS_BETWEEN_REPORTS:
            return
        self._reported = now
        counted = self._counters.sums()
        total = sum(self._job.inputs[index].bytes for index in self._mine)
        self._progress(
            Progress(
                shards=len(self.done) + len(self.failed),
                total_shards=len(self._mine),
                input_bytes=counted["read"] + counted["reading"],
                total_bytes=total - counted["kept"],
                documents=counted["documents"],
                tokens=counted["tokens"],
                text_bytes=counted["text_bytes"],
                seconds=now - self._started,
            )
        )


@dataclass(frozen=True)
class Outcome:
    """A shard's manifest, or who works on it, or why it could not be written."""

    manifest: Manifest | None = None
    written: bool = False
    busy: str = ""
    error: str | None = None


class ShardWork:
    """Prepares one shard after the other with one tokenizer."""

    def __init__(
        self,
        job: PrepJob,
        plan: Plan,
        tokenizer: tokenizers.Tokenizer,
        counters: Counters,
        report: Callable[[], None],
    ) -> None:
        self._job, self._plan, self._tokenizer = job, plan, tokenizer
        self._counters, self._report = counters, report
        self._stems = plan.stems(job.output)

    def __call__(self, index: int, wait: bool) -> Outcome:
        entry, stem = self._job.inputs[index], self._stems[index]
        try:
            manifest, written = self._write(entry, stem, wait)
        except BusyError as error:
            return Outcome(busy=str(error))
        except (DataError, OSError) as error:
            return Outcome(error=f"{entry.path}: {error}" if str(entry.path) not in str(error) else str(error))
        finally:
            self._counters["reading"] = 0
        self._counters["read" if written else "kept"] += entry.bytes
        self._report()
        return Outcome(manifest, written)

    def _write(self, entry: ShardInput, stem: Path, wait: bool) -> tuple[Manifest, bool]:
        spec = ShardSpec(
            input_sha256=input_sha256(entry, stem),
            tokenizer_sha256=self._tokenizer.sha256,
            config_sha256=self._plan.config_sha256,
            vocab_size=self._tokenizer.vocab_size,
            loss_mask=self._plan.loss_mask,
            input_name=entry.name,
            input_bytes=entry.bytes,
        )
        return write_input(
            self._items(entry),
            self._tokenizer,
            spec,
            stem,
            limits=self._job.limits,
            progress=self._count,
            wait=wait,
        )

    def _items(self, entry: ShardInput) -> Iterator[Item]:
        try:
            yield from self._job.read(entry, self._job.options, self._read)
        except OSError as error:
            raise DataError(f"cannot read {entry.path}: {error.strerror or error}") from error

    def _read(self, size: int) -> None:
        self._counters["reading"] = size

    def _count(self, done: Done) -> None:
        self._counters["documents"] += done.documents
        self._counters["tokens"] += done.tokens
        self._counters["text_bytes"] += done.text_bytes
        self._report()


def start_worker(row: int, counters: Sequence[int], job: PrepJob) -> Callable[[tuple[int, bool]], Outcome]:
    """What a worker process does with each (shard, whether to wait for its lock); the plan is there by then."""
    tokenizer = tokenizers.load(job.tokenizer, backend=job.backend)
    work: ShardWork | None = None

    def prepare(task: tuple[int, bool]) -> Outcome:
        nonlocal work
        if work is None:
            work = ShardWork(job, read_plan(job.output), tokenizer, Counters(counters, row), lambda: None)
        return work(*task)

    return prepare


def input_sha256(entry: ShardInput, stem: Path) -> str:
    """The input's hash, kept in NAME.input.json for as long as the file's size and time of change stay the same."""
    if not entry.path.is_file():
        return entry.sha256()
    record, lock_file = output_path(stem, ".input.json"), output_path(stem, ".input.lock")
    status = entry.path.stat()
    stamp = {"name": entry.name, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
    if not lock_file.exists() and (digest := _recorded_sha256(record, stamp)):
        return digest
    with lock(lock_file, wait=True):
        digest = _recorded_sha256(record, stamp)
        if digest is None:
            digest = entry.sha256()
            write_atomically(record, json_bytes({**stamp, "sha256": digest}))
        return digest


def _recorded_sha256(record: Path, stamp: dict[str, Any]) -> str | None:
    try:
        there = read_json(record)
    except DataError:
        return None
    digest = there.pop("sha256", None)
    return digest if there == stamp and isinstance(digest, str) else None
