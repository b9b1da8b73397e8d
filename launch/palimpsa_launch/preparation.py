"""A preparation: `prep` commands that make a run's data, some of them as arrays of tasks, and what joins their sets.

`python -m palimpsa_launch.preparation FILE` is what its last job runs: it merges the arrays' sets, does the rest and
marks the preparation as complete.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

from palimpsa_data import DataError, tokenizers
from palimpsa_data.files import json_bytes, json_sha256, write_atomically
from palimpsa_data.merge import job_status, merge
from palimpsa_data.plan import plan_of, save_plan
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from megatron_palimpsa.config import ConfigError, apply_overrides, read_as, read_tree, write_yaml
from palimpsa_launch.job import JobConfig, Name, change_job

_STRICT = ConfigDict(extra="forbid", strict=True)
_KEYS = {"name", "output_dir", "arrays", "then", "job"}
_MARKER, _STARTED = "PREPARATION_COMPLETE", "started.json"

Command = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")]


@dataclass(frozen=True, config=_STRICT)
class Array:
    """A command that makes a set, spread over tasks."""

    command: Command
    """Arguments of `megatron-palimpsa`, without --shard: `prep fineweb INPUT ... --output FOLDER --tokenizer FILE`."""
    tasks: Annotated[int, Field(gt=0, le=100_000)] = 1
    """Task i of N makes the shards i, i + N, i + 2N, ... of the set."""


@dataclass(frozen=True, config=_STRICT)
class Preparation:
    """What has to be there before a run's first stage; its folder is `output_dir/name`.

    Quotes group the words of a command; no shell reads it.
    """

    name: Annotated[str, Field(max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    output_dir: str
    arrays: dict[Name, Array] = dataclasses.field(default_factory=dict)
    """By name, side by side."""
    then: list[Command] = dataclasses.field(default_factory=list)
    """More commands of `megatron-palimpsa`, one after the other when the arrays' sets are whole: `prep blend ...`,
    `convert ...`. Run again after a kill, those of `convert` whose output is there are left out."""
    job: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Keys of the job's settings that are others than the stages': no GPUs, another partition."""

    @property
    def folder(self) -> Path:
        return Path(self.output_dir) / self.name


def is_preparation(recipe: Path) -> bool:
    """Whether the recipe has a preparation's keys instead of a stage's."""
    return bool(read_tree(recipe).keys() & {"arrays", "then"})


def load(recipe: Path, overrides: list[str]) -> Preparation:
    """Read a preparation; of the overrides those of its own keys count.

    Raises:
        ConfigError: names the file, the key or the command, and what is wrong with it.
    """
    tree = read_tree(recipe)
    apply_overrides(tree, [item for item in overrides if item.partition("=")[0].split(".")[0] in _KEYS])
    config = read_as(Preparation, tree, str(recipe))
    if clash := config.arrays.keys() & {"finish"}:
        raise ConfigError(f"{recipe}: arrays.{clash.pop()}: that is the name of the last job; choose another")
    for name, array in config.arrays.items():
        _parse(array.command, f"{recipe}: arrays.{name}.command", makes_a_set=True)
    for number, command in enumerate(config.then):
        _parse(command, f"{recipe}: then.{number}")
    return config


def words(command: str) -> list[str]:
    """Arguments of `megatron-palimpsa`."""
    return shlex.split(command)


def as_yaml(config: Preparation) -> str:
    return write_yaml(dataclasses.asdict(config))


def job_of(config: Preparation, job: JobConfig) -> JobConfig:
    """The stages' job with this preparation's changes, on one node."""
    return change_job(job, {"nodes": 1, **config.job}, f"{config.name}: job")


def is_complete(config: Preparation) -> bool:
    """Whether these very commands have come to their end."""
    try:
        return (config.folder / _MARKER).read_text().strip() == _fingerprint(config)
    except OSError:
        return False


def tasks_left(config: Preparation, name: str) -> list[int]:
    """Which tasks of an array have shards to make; checks its inputs and tokenizer.

    Raises:
        ConfigError: an input or the tokenizer is missing, or the set's folder holds something else.
    """
    array = config.arrays[name]
    options = _parse(array.command, f"arrays.{name}.command")
    try:
        job = options.job(options)
        plan = plan_of(job, tokenizers.load(job.tokenizer, backend="huggingface").info)
        if not (job.output / "job.json").is_file():
            return list(range(min(array.tasks, len(job.inputs))))
        save_plan(job.output, plan)  # refused where it is another job's folder
        states = job_status(job.output).shards
    except DataError as error:
        raise ConfigError(f"arrays.{name}: {error}") from None
    return sorted({shard % array.tasks for shard, state in enumerate(states) if state.state != "complete"})


def progress(config: Preparation) -> tuple[int, int]:
    """-> shards that are complete, shards of the arrays whose first task has begun."""
    folders = [_parse(array.command, "command").output for array in config.arrays.values()]
    shards = [shard for folder in folders if (folder / "job.json").is_file() for shard in job_status(folder).shards]
    return sum(shard.state == "complete" for shard in shards), len(shards)


def finish(config: Preparation) -> int:
    """Merge the arrays' sets, run the commands behind them and mark the preparation; -> exit code.

    Raises:
        DataError: shards are missing.
    """
    from megatron_palimpsa import cli

    for array in config.arrays.values():
        folder = _parse(array.command, "command").output
        _, report = merge(folder)
        print(report.text(), flush=True)
    config.folder.mkdir(parents=True, exist_ok=True)
    for number, command in enumerate(config.then):
        if _was_done(config, number):
            print(f"{command}: its output is there", flush=True)
            continue
        print(f"megatron-palimpsa {shlex.join(words(command))}", flush=True)
        if code := cli.main(words(command)):
            return code
    write_atomically(config.folder / _MARKER, f"{_fingerprint(config)}\n".encode())
    return 0


def outputs(config: Preparation) -> list[Path]:
    """What the commands of `then` write, as far as they name it."""
    parsed = [_parse(command, "then") for command in config.then]
    return [options.output for options in parsed if hasattr(options, "output")]


def _was_done(config: Preparation, number: int) -> bool:
    """Whether a command of `then` has come to its end here, behind the same others.

    An output that appears by a rename is whole; that it is of this command says a note from before it was there.
    """
    options = _parse(config.then[number], f"then.{number}")
    if not getattr(options, "appears_whole", False):
        return False
    path = config.folder / _STARTED
    started = json.loads(path.read_text()) if path.is_file() else []
    own = json_sha256([[array.command for array in config.arrays.values()], config.then[: number + 1]])
    is_there = bool(options.output.exists())
    if not is_there and own not in started:
        write_atomically(path, json_bytes([*started, own]))
    return is_there and own in started


def _fingerprint(config: Preparation) -> str:
    return json_sha256([[array.command for array in config.arrays.values()], config.then])


def _parse(command: str, where: str, *, makes_a_set: bool = False) -> argparse.Namespace:
    from megatron_palimpsa import cli

    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(errors):
            options = cli.parse(words(command))
    except ValueError as error:
        raise ConfigError(f"{where}={command!r}: {error}") from None
    except SystemExit:
        message = errors.getvalue().strip().splitlines()[-1].rpartition("error: ")[2]
        raise ConfigError(f"{where}={command!r}: {message}") from None
    if makes_a_set and not (hasattr(options, "job") and options.shard is None):
        raise ConfigError(f"{where}={command!r}: must make a set, without --shard: its tasks share it out")
    return options


def main() -> int:
    try:
        return finish(load(Path(sys.argv[1]), []))
    except (ConfigError, DataError) as error:
        print(f"megatron-palimpsa: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
