"""A run on this machine, without SLURM: its steps one after the other, each stage in as many processes as it is given.

What is complete is passed over, what was cut goes on, so that the same command after a kill ends the run. Processes are
started as torchrun would, but end with this one however it ends: torchrun's go on when it is killed, and would train
into a folder that the next call wants.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from palimpsa_data.files import write_atomically

from megatron_palimpsa.config import ConfigError, StageConfig, save_resolved
from megatron_palimpsa.lifeline import answering_signals, tied_process
from megatron_palimpsa.training.exit_codes import ExitCode
from megatron_palimpsa.training.run_folder import RunFolder
from palimpsa_launch import preparation
from palimpsa_launch.attempts import Attempt, attempts
from palimpsa_launch.chain import Before, check_folders, describe_stage, evaluation_command, load_recipe, resolved_path
from palimpsa_launch.log_reader import LogReader
from palimpsa_launch.preparation import Preparation

_LOOK_EVERY = 0.2  # seconds
_GRACE = 30.0
"""So long the other ranks have to end by themselves when one has failed."""

Step = StageConfig | Preparation


def plan_here(recipes: Sequence[Path], overrides: list[str], ranks: int, gpu_memory: int | None) -> list[str]:
    """Check every step before the first one starts; -> the plan of each that is left.

    Raises:
        ConfigError: names the recipe, what is wrong and what to do.
    """
    configs = [load_recipe(recipe, overrides) for recipe in recipes]
    check_folders(recipes, configs)
    plans: list[str] = []
    left: list[Step] = []
    for recipe, config in zip(recipes, configs, strict=True):
        try:
            if _is_complete(config):
                kind = "preparation" if isinstance(config, Preparation) else "stage"
                plans.append(f"{kind:<14} {config.name}: complete already")
            elif isinstance(config, Preparation):
                for array in config.arrays:
                    preparation.tasks_left(config, array)
                plans.append(f"preparation    {config.name} -> {config.folder}")
                left.append(config)
            else:
                plans.append(describe_stage(config, Before.of(left), ranks, f"--nproc {ranks}", gpu_memory))
                evaluation_command(config, config.folder, sys.executable)
                left.append(config)
        except ConfigError as error:
            raise ConfigError(f"{recipe}: {error}") from None
    return plans


def run_here(recipes: Sequence[Path], overrides: list[str], ranks: int) -> ExitCode:
    """Do what is left of the steps, in order, after `plan_here` has checked them; -> exit code."""
    for number, recipe in enumerate(recipes, 1):
        config = load_recipe(recipe, overrides)
        title = f"[{number}/{len(recipes)}] {config.name}"
        done = _is_complete(config)
        print(f"{title}: {'complete already' if done else f'into {config.folder}'}", flush=True)
        if not done and (code := _do(config, ranks)):
            return code
        if isinstance(config, StageConfig) and (code := _evaluate(config)):
            return code
    return ExitCode.COMPLETE


def _is_complete(config: Step) -> bool:
    if isinstance(config, Preparation):
        return preparation.is_complete(config)
    folder = RunFolder(config.folder)
    if folder.read_marker() is None:
        return False
    folder.check_config(config)
    return True


def _do(config: Step, ranks: int) -> ExitCode:
    folder = config.folder
    resolved = resolved_path(folder, isinstance(config, Preparation))
    resolved.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(config, StageConfig):
        save_resolved(config, resolved)
        return _train(folder, resolved, ranks)
    write_atomically(resolved, preparation.as_yaml(config).encode())
    commands = [("megatron_palimpsa", preparation.words(array.command)) for array in config.arrays.values()]
    for module, arguments in [*commands, ("palimpsa_launch.preparation", [str(resolved)])]:
        print(f"{module} {shlex.join(arguments)}", flush=True)
        with tied_process(module, arguments, os.environ) as process, _stopping(process) as stopped:
            code = process.wait()
        if stopped:
            return ExitCode.SAVED_AND_STOPPED
        if code:
            return ExitCode.WRONG_INPUT if code == ExitCode.WRONG_INPUT else ExitCode.FAILED
    return ExitCode.COMPLETE


def _train(folder: Path, resolved: Path, ranks: int) -> ExitCode:
    logs = folder / "logs" / f"local-{_next_number(folder)}"
    logs.mkdir(parents=True)
    stop_file = logs / "STOP"
    environment = {**os.environ, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "PALIMPSA_STOP_FILE": str(stop_file)}
    if ranks > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    arguments = [str(logs), "train", str(resolved)]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                tied_process(
                    "palimpsa_launch.rank", arguments, environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                )
            )
            for rank in range(ranks)
        ]
        with _stopping(*processes, stop_file=stop_file) as stopped:
            _watch(processes, LogReader(Attempt(logs).log(0)))
    codes = [process.returncode for process in processes]
    return _outcome(folder, Attempt(logs), codes, bool(stopped))


def _next_number(folder: Path) -> int:
    """Above those that are there: older ones may have been removed."""
    names = [attempt.folder.name.rpartition("-") for attempt in attempts(folder)]
    return 1 + max((int(number) for kind, _, number in names if kind == "local"), default=0)


def _watch(processes: Sequence[subprocess.Popen[bytes]], log: LogReader) -> None:
    """Show what the first rank logs until all have ended; where one has failed the others are given some time."""
    failed_at: float | None = None
    while any(process.poll() is None for process in processes):
        time.sleep(_LOOK_EVERY)
        log.write_rest(_show)
        if failed_at is None and any(process.returncode for process in processes):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > _GRACE:
            for process in processes:
                process.kill()
    log.write_rest(_show)


def _outcome(folder: Path, attempt: Attempt, codes: Sequence[int], stopped: bool) -> ExitCode:
    if not any(codes):
        return ExitCode.COMPLETE
    for code in (ExitCode.NUMERICAL_STOP, ExitCode.WRONG_INPUT):
        if code in codes:
            print(f"{folder}: {attempt.last_error()}", file=sys.stderr)
            return code
    if all(code in (0, ExitCode.SAVED_AND_STOPPED) for code in codes):
        return ExitCode.SAVED_AND_STOPPED
    if stopped:
        return ExitCode.INTERRUPTED
    killed = [f"rank {rank} by {signal.Signals(-code).name}" for rank, code in enumerate(codes) if code < 0]
    reason = attempt.last_error() or f"ended: {', '.join(killed)}"
    print(f"{folder}: {reason}; the same command goes on from the last checkpoint", file=sys.stderr)
    return ExitCode.FAILED


def _evaluate(config: StageConfig) -> ExitCode:
    folder = RunFolder(config.folder)
    if config.evaluation is None or folder.is_evaluated:
        return ExitCode.COMPLETE
    command = evaluation_command(config, Path.cwd() / config.folder, sys.executable)
    print(f"evaluation: {shlex.join(command)}", flush=True)
    try:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
    except OSError as error:
        print(f"evaluation: {error}", file=sys.stderr)
        code = 1
    if code:
        print(f"evaluation of {config.name} ended with {code}; the same command tries again", file=sys.stderr)
        return ExitCode.FAILED
    folder.evaluated.touch()
    return ExitCode.COMPLETE


@contextlib.contextmanager
def _stopping(*processes: subprocess.Popen[bytes], stop_file: Path | None = None) -> Iterator[list[int]]:
    """Ctrl-C and its like ask ranks to save and stop, or end what cannot; once more kills. -> the signals received."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1 and stop_file is not None:
            print("\nstopping after the present step; once more stops at once", flush=True)
            stop_file.touch()
            return
        for process in processes:
            process.kill()

    with answering_signals(handle):
        yield received


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
