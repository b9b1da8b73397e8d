"""A job's output folder seen as a whole: which shards are there, and all of them joined into a set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from palimpsa_data.errors import DataError
from palimpsa_data.locks import holder, lock
from palimpsa_data.plan import Plan, read_plan
from palimpsa_data.report import Report, report_on, write_report
from palimpsa_data.sets import SetInfo, write_set
from palimpsa_data.shards import Manifest, check_shard, manifest_path, output_path

_MOST_NAMED = 20


@dataclass(frozen=True)
class ShardState:
    """One shard of a job: `complete` with its manifest, `working` (by whom), `bad` (why), or `missing`."""

    stem: Path
    input_name: str
    state: Literal["complete", "working", "bad", "missing"]
    detail: str = ""
    manifest: Manifest | None = None


@dataclass(frozen=True)
class JobStatus:
    """The state of every shard, in order, by sizes and indices (`sets.find_problems` reads every byte)."""

    folder: Path
    plan: Plan
    shards: tuple[ShardState, ...]
    merged: bool

    @property
    def is_complete(self) -> bool:
        return all(shard.state == "complete" for shard in self.shards)

    def text(self) -> str:
        """For people: counts, every shard that is not there, what to do next."""
        counts = {state: sum(shard.state == state for shard in self.shards) for state in ("complete", "working", "bad")}
        tokens = sum(shard.manifest.tokens for shard in self.shards if shard.manifest)
        lines = [
            f"{self.folder}: {counts['complete']} of {len(self.shards)} shards complete ({tokens:,} tokens), "
            f"{counts['working']} in work, {counts['bad']} damaged, "
            f"{len(self.shards) - sum(counts.values())} not begun"
        ]
        open_ones = [shard for shard in self.shards if shard.state != "complete"]
        for shard in open_ones[:_MOST_NAMED]:
            lines.append(f"  {shard.state:<8} {shard.stem.name}  {shard.input_name}  {shard.detail}".rstrip())
        if len(open_ones) > _MOST_NAMED:
            lines.append(f"  and {len(open_ones) - _MOST_NAMED} more")
        return "\n".join([*lines, self._next()])

    def _next(self) -> str:
        if not self.is_complete:
            return "run the same prep command again for what is missing"
        return "merged: set.json is there" if self.merged else f"next: prep merge {self.folder}"


def job_status(folder: Path) -> JobStatus:
    """Raises DataError where no job was started in the folder."""
    plan = read_plan(folder)
    names = [name for name, _ in plan.inputs]
    states = tuple(_state(stem, name, plan) for stem, name in zip(plan.stems(folder), names, strict=True))
    return JobStatus(folder, plan, states, (folder / "set.json").is_file())


def merge(folder: Path) -> tuple[SetInfo, Report]:
    """Join a finished job's shards into the set `folder`: write set.json, report.txt, report.json and lengths.png.

    Raises:
        DataError: a shard is missing, damaged or in work; the message names them.
    """
    status = job_status(folder)
    if not status.is_complete:
        raise DataError(f"cannot merge yet: {status.text()}")
    manifests = {shard.stem: shard.manifest for shard in status.shards if shard.manifest}
    with lock(folder / "set.lock", wait=True):
        info = write_set(folder, status.plan.name, status.plan.tokenizer, manifests)
        report = report_on(info.name, manifests)
        write_report(folder, report)
    return info, report


def _state(stem: Path, name: str, plan: Plan) -> ShardState:
    if at_work := holder(output_path(stem, ".lock")):
        return ShardState(stem, name, "working", at_work)
    if not manifest_path(stem).is_file():
        return ShardState(stem, name, "missing")
    try:
        manifest = check_shard(stem, checksums=False)
    except DataError as error:
        return ShardState(stem, name, "bad", str(error))
    if (manifest.spec.config_sha256, manifest.spec.tokenizer_sha256) != (plan.config_sha256, plan.tokenizer.sha256):
        return ShardState(stem, name, "bad", "made by another job than job.json describes")
    return ShardState(stem, name, "complete", manifest=manifest)
