"""What a job makes, written into its output folder before the first shard.

OUTPUT/job.json names the inputs in order: input i becomes shard i. Every process of the job, on whatever machine,
finds the same plan there or is refused, so shards of two jobs never mix; `status` and `merge` read it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from palimpsa_data import sources
from palimpsa_data.documents import Item
from palimpsa_data.errors import DataError
from palimpsa_data.files import json_bytes, json_sha256, write_atomically
from palimpsa_data.locks import lock
from palimpsa_data.pipeline import Limits
from palimpsa_data.records import is_file_name, read_record
from palimpsa_data.sets import TokenizerInfo
from palimpsa_data.shards import manifest_path, shard_stem
from palimpsa_data.sources.options import deciding

FORMAT = 1
_RECIPE = 1  # part of every shard's hash: raise it when the same input and options are to give other tokens


class ShardInput(Protocol):
    """What becomes one shard; see `sources.Input`. `bytes` is 0 where it is not known."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> Path: ...

    @property
    def bytes(self) -> int: ...

    def sha256(self) -> str: ...


@dataclass(frozen=True)
class PrepJob:
    """Inputs, how they are read, and where their shards go.

    Args:
        kind: the source's name, for reports.
        read: items of an input; called as `read(input, options, progress)` in a process of its own, so a function of a
            module or an object that can be pickled.
        options: a dataclass; see `sources.options.deciding` for which of its fields decide what the shards hold.
        output: the folder; its name is that of the set.
        loss_mask: the items are examples, of which the answers alone are trained on.
    """

    kind: str
    inputs: Sequence[ShardInput]
    options: Any
    tokenizer: Path
    output: Path
    limits: Limits = field(default_factory=Limits)
    loss_mask: bool = False
    backend: str = "auto"
    read: Callable[[Any, Any, Callable[[int], None]], Iterator[Item]] = sources.read


@dataclass(frozen=True)
class Plan:
    """Content of OUTPUT/job.json. `inputs` has a name and a size each."""

    format: int
    name: str
    kind: str
    options: dict[str, Any]
    limits: dict[str, Any]
    tokenizer: TokenizerInfo
    loss_mask: bool
    inputs: list[tuple[str, int]]
    recipe: int = _RECIPE

    @property
    def config_sha256(self) -> str:
        """Of everything but the inputs: what `ShardSpec.config_sha256` is."""
        settings = (self.recipe, self.kind, self.options, self.limits, self.tokenizer.eod_id, self.loss_mask)
        return json_sha256(settings)

    def stems(self, folder: Path) -> list[Path]:
        """Path without suffix of every shard, in order."""
        return [shard_stem(folder, self.name, shard, len(self.inputs)) for shard in range(len(self.inputs))]


def plan_of(job: PrepJob, tokenizer: TokenizerInfo) -> Plan:
    """Raises DataError for a job without inputs, with one of them in its output, or with a name that is not UTF-8."""
    if not job.inputs:
        raise DataError(f"{job.output}: nothing to prepare; name at least one input")
    _check_output(job)
    return Plan(
        format=FORMAT,
        name=job.output.resolve().name,
        kind=job.kind,
        options=deciding(job.options),
        limits=dataclasses.asdict(job.limits),
        tokenizer=tokenizer,
        loss_mask=job.loss_mask,
        inputs=[(entry.name, entry.bytes) for entry in job.inputs],
    )


def _check_output(job: PrepJob) -> None:
    output = job.output.resolve()
    try:
        str(output).encode()
    except UnicodeEncodeError:
        raise DataError(f"--output {os.fsencode(output)!r}: the name is not UTF-8; choose another") from None
    for entry in job.inputs:
        # A second call would take what the first one wrote for inputs.
        if entry.path.exists() and output in (entry.path.parent.resolve() / entry.path.name).parents:
            raise DataError(f"{entry.path}: an input cannot lie in --output {job.output}; choose another --output")


def save_plan(folder: Path, plan: Plan) -> None:
    """Write job.json, or find the same one there; an input without a complete shard may have another size since.

    Raises:
        DataError: the folder holds another job or something else than a job, and the message says where the jobs
            differ; or it cannot be written into.
    """
    path, lock_file = folder / "job.json", folder / "job.lock"
    try:
        if not path.is_file() or lock_file.exists():  # it stays behind a killed process
            folder.mkdir(parents=True, exist_ok=True)
            with lock(lock_file, wait=True):
                if not path.is_file():
                    write_atomically(path, json_bytes(dataclasses.asdict(plan)))
    except OSError as error:
        raise DataError(
            f"cannot write into {folder}: {error.strerror}; make space, change rights or choose another --output"
        ) from error
    there = read_plan(folder)
    if there == plan:
        return
    if refetched := _refetched(there, plan):
        stems = plan.stems(folder)
        _require_no_shards({plan.inputs[shard][0]: manifest_path(stems[shard]) for shard in refetched})
        with lock(lock_file, wait=True):
            write_atomically(path, json_bytes(dataclasses.asdict(plan)))
        return
    differing = [key.name for key in dataclasses.fields(plan) if getattr(there, key.name) != getattr(plan, key.name)]
    what = "; ".join(_difference(key, getattr(there, key), getattr(plan, key)) for key in differing)
    raise DataError(f"{folder} holds another job: {what}. Choose another --output, or remove that folder")


def _refetched(there: Plan, here: Plan) -> list[int]:
    """Numbers of the inputs whose sizes alone differ, where nothing else does."""
    names = [[name for name, _ in plan.inputs] for plan in (there, here)]
    if names[0] != names[1] or dataclasses.replace(there, inputs=here.inputs) != here:
        return []
    return [shard for shard, (old, new) in enumerate(zip(there.inputs, here.inputs, strict=True)) if old != new]


def _require_no_shards(manifests: dict[str, Path]) -> None:
    made = [(name, manifest) for name, manifest in manifests.items() if manifest.exists()]
    if made:
        name, manifest = made[0]
        more = f" (so are {len(made) - 1} more)" if len(made) > 1 else ""
        raise DataError(
            f"{manifest} is of another {name} than that is now{more}: choose another --output, or remove the "
            f"manifest to have the shard made of the new file"
        )


def read_plan(folder: Path) -> Plan:
    """Raises DataError naming the file when it is missing or is no plan of this version."""
    path = folder / "job.json"
    if not path.is_file():
        raise DataError(f"{path} is missing: no job was started in this folder")
    remedy = "remove the folder and prepare the data again"
    plan = read_record(path, Plan, format=FORMAT, what="a job", remedy=remedy)
    if not is_file_name(plan.name):
        raise DataError(f"{path}: name {plan.name!r} is no file name; {remedy}")
    return plan


def _difference(key: str, there: Any, here: Any) -> str:
    if isinstance(there, dict) and isinstance(here, dict):
        keys = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
        return ", ".join(f"{key}.{name} {there.get(name)!r} there, {here.get(name)!r} here" for name in keys)
    if key == "inputs":
        changed = sorted({name for name, _ in set(there) ^ set(here)})
        names = ", ".join(changed[:3]) + (", ..." if len(changed) > 3 else "")
        return f"{len(there)} inputs there, {len(here)} here, differing in {names or 'their order'}"
    if key == "tokenizer":
        return f"another tokenizer ({there.sha256[:12]}... there, {here.sha256[:12]}... here)"
    return f"{key} {there!r} there, {here!r} here"
