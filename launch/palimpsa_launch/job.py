"""What a stage's SLURM job asks for: nodes, time, partition and the environment that its processes run in.

Values end up in a batch script. Those of `#SBATCH` lines are of few letters; all others may hold anything but control
characters, and `render` quotes them.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from megatron_palimpsa.config import ConfigError, read_as, read_tree
from palimpsa_launch.preflight.settings import Preflight

# What the shell or SLURM sets for itself.
_RESERVED = re.compile(r"(SLURM|SBATCH|BASH)\w*|PALIMPSA_STOP_FILE|UID|EUID|PPID|SHELLOPTS|GROUPS|IFS|PATH")

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_NO_CONTROLS = r"^[^\x00-\x1f\x7f]+$"

Positive = Annotated[int, Field(gt=0, le=100_000)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=100)]
Names = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.,-]*$", max_length=1000)]
NodeList = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.,\[\]-]*$", max_length=10_000)]
Constraint = Annotated[str, Field(pattern=r"^[A-Za-z0-9_\[(][A-Za-z0-9_.:=,&|*\[\]()-]*$", max_length=1000)]
Text = Annotated[str, Field(pattern=_NO_CONTROLS, max_length=4096)]
Mount = Annotated[str, Field(pattern=r"^/[^\x00-\x1f\x7f,]*$", max_length=4096)]
# Upper case only: the script's own variables are in lower case.
Variable = Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$", max_length=100)]
Value = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*$", max_length=4096)]


def _quoted(value: Any) -> Any:
    if isinstance(value, int):
        raise ValueError("put it in quotes: YAML takes 12:00:00 for a number")
    return value


TimeLimit = Annotated[str, BeforeValidator(_quoted), Field(pattern=r"^(\d{1,3}-)?\d{1,4}(:\d{1,2}){0,2}$")]


@dataclass(frozen=True, config=_STRICT)
class Container:
    """An image that holds this project; the working folder and the stage's folder are mounted by themselves."""

    engine: Literal["apptainer", "pyxis"]
    image: Text
    """apptainer: a .sif file, a folder or a URI; pyxis: what `srun --container-image` takes."""
    mounts: list[Mount] = dataclasses.field(default_factory=list)
    """Folders that it needs besides, such as those of the data: HOST, HOST:INSIDE or HOST:INSIDE:ro."""


@dataclass(frozen=True, config=_STRICT)
class JobConfig:
    """The job of a stage; every stage of a chain gets the same."""

    time: TimeLimit
    """Limit as SLURM reads it: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS. The stage goes on in the next
    attempt where it is not enough."""
    nodes: Positive = 1
    gpus_per_node: Annotated[int, Field(ge=0, le=64)] = 8
    processes_per_node: Positive | None = None
    """None: one a GPU. Without GPUs it has to be given."""
    partition: Names | None = None
    account: Name | None = None
    qos: Name | None = None
    constraint: Constraint | None = None
    exclude: NodeList | None = None
    exclusive: bool = True
    """Whole nodes with all their memory; false shares them and needs `cpus_per_node` and `memory`."""
    cpus_per_node: Positive | None = None
    memory: Annotated[str, Field(pattern=r"^[1-9]\d{0,8}[KMGT]$")] | None = None
    """Of a node, such as 500G."""
    save_seconds: Annotated[int, Field(ge=30, le=65_535)] = 300
    """So long before the limit the ranks are told to save and stop; a step and a save must fit into it."""
    max_requeues: Annotated[int, Field(ge=0, le=1000)] = 20
    """Attempts beyond the first, whatever ended the one before."""
    python: Text | None = None
    """Interpreter that has this project; None: the one in use, in a container `python3`."""
    container: Container | None = None
    variables: dict[Variable, Value] = dataclasses.field(default_factory=dict)
    """Environment variables of the ranks, such as NCCL_SOCKET_IFNAME; they go over those of `environment`."""
    local_folder: Annotated[str, Field(pattern=r"^(/[^\x00-\x1f\x7f]*)?$", max_length=4096)] = ""
    """On each node's own disk, for compiled kernels; "": $SLURM_TMPDIR, $TMPDIR or /tmp."""
    preflight: Preflight | None = dataclasses.field(default_factory=Preflight)
    """What every node is asked before an attempt; None: nothing."""

    @property
    def ranks_per_node(self) -> int:
        return self.processes_per_node or self.gpus_per_node

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def layout(self) -> str:
        return f"{self.nodes} nodes x {self.ranks_per_node} processes"

    @property
    def interpreter(self) -> str:
        return self.python or ("python3" if self.container else sys.executable)

    @property
    def seconds(self) -> int:
        """The time limit."""
        return parse_time(self.time)


def parse_time(text: str) -> int:
    """`90`, `90:00`, `1:30:00`, `1-6`, `1-6:30` or `1-6:30:00` as SLURM reads them -> seconds."""
    days, dash, clock = text.rpartition("-")
    fields = [int(field) for field in clock.split(":")]
    if dash:  # hours come first
        hours, minutes, seconds = (*fields, 0, 0)[:3]
    elif len(fields) == 3:
        hours, minutes, seconds = fields
    else:
        hours, (minutes, seconds) = 0, (*fields, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def load_job(path: str | Path | None, changes: Mapping[str, Any]) -> JobConfig:
    """Read a job's YAML file, if there is one, with its bases; `changes` that are not None go over it.

    Raises:
        ConfigError: names the file, the key, the value and what is allowed.
    """
    tree = {} if path is None else read_tree(path)
    changes = {key: value for key, value in changes.items() if value is not None}
    if isinstance(tree.get("container"), dict) and "container" in changes:
        changes["container"] = tree["container"] | changes["container"]
    tree |= changes
    where = "job" if path is None else str(path)
    job = read_as(JobConfig, tree, where)
    _check(job, where)
    return job


def change_job(job: JobConfig, changes: Mapping[str, Any], where: str) -> JobConfig:
    """The job with other settings.

    Raises:
        ConfigError: names `where`, the key, the value and what is allowed.
    """
    changed = read_as(JobConfig, dataclasses.asdict(job) | dict(changes), where)  # type: ignore[call-overload]
    _check(changed, where)
    return changed


def check_environment(job: JobConfig) -> None:
    """Raises ConfigError where the interpreter, the image or a folder to mount is not there."""
    if job.container is None:
        if not os.access(job.interpreter, os.X_OK) or Path(job.interpreter).is_dir():
            raise ConfigError(f"python={job.interpreter!r} is not a program here; name the interpreter of a .venv")
        return
    image = job.container.image
    if job.container.engine == "apptainer" and "://" not in image and not Path(image).exists():
        raise ConfigError(f"container.image={image!r} is not there; name a .sif file, a folder or a URI")
    for mount in job.container.mounts:
        if not Path(mount.split(":")[0]).exists():
            raise ConfigError(f"container.mounts: {mount.split(':')[0]!r} is not there")


def _check(job: JobConfig, where: str) -> None:
    if not job.ranks_per_node:
        raise ConfigError(f"{where}: processes_per_node is missing: gpus_per_node=0 leaves open how many there are")
    if job.seconds <= job.save_seconds:
        raise ConfigError(
            f"{where}: time={job.time} is {job.seconds} s; it must be above save_seconds={job.save_seconds}, "
            f"which is kept for saving at its end"
        )
    if not job.exclusive and (job.cpus_per_node is None or job.memory is None):
        raise ConfigError(f"{where}: exclusive=false shares the nodes: set cpus_per_node and memory")
    if reserved := [name for name in job.variables if _RESERVED.fullmatch(name)]:
        raise ConfigError(f"{where}: variables.{reserved[0]} is not for a job to set")
    if job.container is not None:
        image = job.container.image
        bad = re.search(r"[\s,]", image) if job.container.engine == "pyxis" else image.startswith("-")
        if bad:
            raise ConfigError(f"{where}: container.image={image!r} is not the name of an image")
