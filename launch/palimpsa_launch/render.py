"""Batch scripts, from `templates/`: `stage.sh` trains a stage, `task.sh` runs one command; both have the functions of
`slurm.sh`.

Only two more places of a template change: the `#SBATCH` lines, whose values `job` restricts to harmless letters, and
the settings, shell assignments whose values are quoted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shlex
import string
import subprocess
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from megatron_palimpsa.config import ConfigError
from palimpsa_launch.environment import exports
from palimpsa_launch.job import JobConfig


class _Template(string.Template):
    delimiter = "%%"


def render_stage(job: JobConfig, name: str, stage_folder: Path, working_folder: Path, command: Sequence[str]) -> str:
    """-> the text of the batch script that trains a stage.

    Args:
        name: of the job.
        stage_folder: absolute; the job's log, the ranks' logs and the list of attempts go below it.
        working_folder: absolute; paths of recipes start there.
        command: arguments of `megatron-palimpsa` that every rank runs.

    Raises:
        ConfigError: a path or an argument that no script can carry.
    """
    settings: dict[str, str | Sequence[str]] = {
        "processes_per_node": str(job.ranks_per_node),
        "gpus_per_node": str(job.gpus_per_node),
        "local_folder": job.local_folder,
        "exclude": job.exclude or "",
        "preflight": json.dumps(None if job.preflight is None else dataclasses.asdict(job.preflight)),
        "max_excluded": str(0 if job.preflight is None else job.preflight.max_excluded),
        "command": command,
    }
    return _render("stage.sh", job, name, (stage_folder, working_folder), settings)


def render_task(
    job: JobConfig,
    name: str,
    folder: Path,
    working_folder: Path,
    command: Sequence[str],
    *,
    tasks: int | None = None,
    marker: Path | None = None,
) -> str:
    """-> the text of the batch script that runs one command on one node, or a task of an array.

    Args:
        folder: absolute; the job's log goes below it.
        command: a program and its arguments.
        tasks: of the array; each gets `--shard I/TASKS` behind the command.
        marker: a file that is made when the command has ended with 0.

    Raises:
        ConfigError: a path or an argument that no script can carry.
    """
    settings = {"command": command, "tasks": str(tasks or ""), "marker": str(marker or "")}
    return _render("task.sh", job, name, (folder, working_folder), settings, array=tasks is not None)


def job_name(output_dir: str, name: str) -> str:
    """A job's name says its run and its step: SLURM lets one of that name run at a time.

    A few digits of the whole path keep runs of one name in different folders apart.
    """
    run = Path(output_dir).resolve()
    of_path = hashlib.sha256(os.fsencode(run)).hexdigest()[:6]
    return re.sub(r"[^A-Za-z0-9_.-]", "_", f"{run.name}-{of_path}.{name}")


def check_syntax(script: str) -> None:
    """Raises ConfigError where bash cannot read the script; sbatch would take it."""
    try:
        answer = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError("bash is not on PATH: batch scripts need it") from None
    if answer.returncode:
        raise ConfigError(f"the batch script has a syntax error: {answer.stderr.strip()}")


def _render(
    template: str,
    job: JobConfig,
    name: str,
    folders: tuple[Path, Path],
    own: Mapping[str, str | Sequence[str]],
    *,
    array: bool = False,
) -> str:
    folder, working_folder = folders
    sbatch = [f"#SBATCH --{option}" for option in _sbatch(job, name, folder, array)]
    settings: dict[str, str | Sequence[str]] = {
        "stage_folder": str(folder),
        "working_folder": str(working_folder),
        "python": job.interpreter,
        "max_requeues": str(job.max_requeues),
        "srun_options": _pyxis(job, *folders),
        "enter": _apptainer(job, *folders),
        **own,
    }
    lines = [_assignment(key, value) for key, value in settings.items()]
    for key, value, reason in exports(job.variables):
        lines += [*([f"# {reason}"] if reason else []), f"export {key}={_quote(value, f'variables.{key}')}"]
    templates = files(__package__) / "templates"
    return _Template((templates / template).read_text()).substitute(
        sbatch="\n".join(sbatch), settings="\n".join(lines), slurm=(templates / "slurm.sh").read_text().rstrip()
    )


def _sbatch(job: JobConfig, name: str, stage_folder: Path, array: bool) -> list[str]:
    wanted: Mapping[str, str | int | None] = {
        "job-name": name,
        "output": _log_path(stage_folder, "%A_%a" if array else "%j"),
        "comment": f'"{stage_folder}"',
        "open-mode": "append",
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus_per_node or None,
        "cpus-per-task": job.cpus_per_node,
        "mem": job.memory or ("0" if job.exclusive else None),
        "time": job.time,
        "signal": f"B:USR1@{job.save_seconds}",
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "constraint": job.constraint,
        "exclude": job.exclude,
    }
    options = [f"{key}={value}" for key, value in wanted.items() if value is not None]
    return [*options, *(["exclusive"] if job.exclusive else []), "requeue"]


def _log_path(stage_folder: Path, job: str) -> str:
    """SLURM reads the path of a log in its own way: of a folder with other letters it could make anything."""
    path = str(stage_folder)
    if not re.fullmatch(r"/[A-Za-z0-9_./@+=,:~ -]*", path):
        raise ConfigError(
            f"output_dir: SLURM may not take {path!r} for the job's log: letters, digits, spaces and _./@+=,:~- only"
        )
    return f'"{path}/logs/job-{job}.log"'


def _pyxis(job: JobConfig, *folders: Path) -> list[str]:
    container = job.container
    if container is None or container.engine != "pyxis":
        return []
    mounts = [f"{folder}:{folder}" for folder in map(_mountable, folders)]
    own = [job.local_folder] if job.local_folder else []
    mounts += [mount if ":" in mount else f"{mount}:{mount}" for mount in [*own, *container.mounts]]
    return [
        f"--container-image={container.image}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={folders[-1]}",
    ]


def _apptainer(job: JobConfig, *folders: Path) -> list[str]:
    container = job.container
    if container is None or container.engine != "apptainer":
        return []
    own = [job.local_folder] if job.local_folder else []
    mounts = [*map(_mountable, folders), *own, *container.mounts]
    gpus = ["--nv"] if job.gpus_per_node else []
    binds = [f"--bind={mount}" for mount in mounts]
    return ["apptainer", "exec", *gpus, *binds, f"--pwd={folders[-1]}", container.image]


def _mountable(folder: Path) -> str:
    if set(str(folder)) & set(",:"):
        raise ConfigError(f"container: {folder} cannot be mounted: its name has a comma or a colon")
    return str(folder)


def _assignment(key: str, value: str | Sequence[str]) -> str:
    if isinstance(value, str):
        return f"{key}={_quote(value, key)}"
    return f"{key}=({' '.join(_quote(item, key) for item in value)})"


def _quote(value: str, key: str) -> str:
    if not value.isprintable():
        raise ConfigError(f"{key}={value!r}: control characters and the like cannot go into a batch script")
    return shlex.quote(value)
