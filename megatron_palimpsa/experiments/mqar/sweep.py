"""The runs of one or several sweeps, one after the other; any number of processes may work on the same folders.

Each process takes the next run that is neither finished nor held by another. Runs this small leave a GPU waiting for
the host, and processes that share one fill it without any change to the model: each has its own interpreter to launch
kernels from. (Heads of several runs in one scan, or models stacked under `vmap`, would need kernels and layers of
their own; streams of one process share its interpreter, which is what there is too little of.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from megatron_palimpsa.config import ConfigError, read_as, read_tree
from megatron_palimpsa.experiments.mqar.config import Lesson, SweepConfig, settings
from megatron_palimpsa.experiments.mqar.records import (
    Record,
    Run,
    epoch_tokens,
    read_records,
    read_result,
    runs_of,
    tokens_left,
)
from megatron_palimpsa.lifeline import tied_process
from megatron_palimpsa.training.console import clock, short_count
from megatron_palimpsa.training.exit_codes import ExitCode

logger = logging.getLogger(__name__)

_SETTINGS = "settings.yaml"


def claim_folders(configs: Sequence[SweepConfig]) -> None:
    """Make each sweep's folder with its settings, or see that those in it are the same.

    Raises:
        ConfigError: the sweeps do not have one `output_dir` and a name each; a folder holds runs with other settings.
    """
    places = list(dict.fromkeys(config.output_dir for config in configs))
    if len(places) > 1:
        raise ConfigError(f"the recipes write to different folders: {', '.join(places)}; give them one output_dir")
    names = [config.name for config in configs]
    if len(set(names)) < len(names):
        raise ConfigError(f"two recipes have one folder: their names are {', '.join(names)}")
    for config in configs:
        _check_settings(config)
    for config in configs:
        file = config.folder / _SETTINGS
        if not file.exists():
            config.folder.mkdir(parents=True, exist_ok=True)
            temporary = file.with_name(f".settings.{os.getpid()}.tmp")
            temporary.write_text(yaml.safe_dump(settings(config), sort_keys=False))
            temporary.replace(file)


def _check_settings(config: SweepConfig) -> None:
    file = config.folder / _SETTINGS
    if not file.exists():
        return
    # What was not a setting yet when the folder was made has its default.
    free = {"output_dir": config.output_dir, "sweep": dataclasses.asdict(config.sweep)}  # type: ignore[call-overload]
    before = _flat(settings(read_as(SweepConfig, {**read_tree(file), **free}, str(file))))
    now = _flat(settings(config))
    differing = [
        f"{key}={now.get(key)!r} (there {before.get(key)!r})"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if differing:
        raise ConfigError(
            f"{config.folder} holds runs with other settings: {', '.join(differing)}; "
            f"give the sweep another name or output_dir, or remove that folder to start anew"
        )


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, tuple):
        value = {str(index): item for index, item in enumerate(value)}
    if not isinstance(value, dict):
        return {prefix.removesuffix("."): value}
    return {key: item for name, part in value.items() for key, item in _flat(part, f"{prefix}{name}.").items()}


def in_turn(configs: Sequence[SweepConfig]) -> list[Run]:
    """All runs, a seed of every model before the next seed, so that a part of them already compares the models."""
    runs = [run for config in configs for run in runs_of(config)]
    seeds = list(dict.fromkeys(seed for config in configs for seed in config.sweep.seeds))
    rates = list(dict.fromkeys(lr for config in configs for lr in config.sweep.lrs))
    return sorted(runs, key=lambda run: (seeds.index(run.seed), rates.index(run.lr)))


def work(runs: Sequence[Run], minutes: float | None, processes: int) -> None:
    """Train runs that no other process holds, until none is left or the time is over.

    Args:
        minutes: no epoch begins that would end later than so many minutes from now; None: no limit.
        processes: that work on these runs together, for the estimate of the time left.
    """
    from megatron_palimpsa import parallel
    from megatron_palimpsa.config import ParallelConfig
    from megatron_palimpsa.experiments.mqar.run import train_run

    progress = _Progress(runs, minutes, processes)
    parallel.initialize(ParallelConfig(distributed_optimizer=False), seed=0)
    with parallel.leaving():
        for run in runs:
            if read_result(run) is not None:
                continue
            with run.locked() as mine:
                if not mine or read_result(run) is not None:
                    continue
                if not train_run(run, progress):
                    return


def work_in_processes(arguments: Sequence[str], count: int) -> int:
    """Start the command line `arguments` as often, with this process's output; they end with this process.

    Returns:
        The exit code of the first that failed, 0 where none did.
    """
    # Small models train slower on several threads that share the cores with other processes.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(tied_process("megatron_palimpsa", arguments, environment)) for _ in range(count)
        ]
        codes = [process.wait() for process in processes]
    failed = [code for code in codes if code not in (ExitCode.COMPLETE, ExitCode.SAVED_AND_STOPPED)]
    if not failed:
        return ExitCode.COMPLETE
    logger.warning(
        "%d of %d processes ended with exit code %d; what they printed says why", len(failed), count, failed[0]
    )
    return failed[0] if failed[0] > 0 else ExitCode.FAILED


def unfinished(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if read_result(run) is None]


@dataclass
class _Progress:
    """Says how far this process and all of them together are, and when there is no time for another epoch."""

    runs: Sequence[Run]
    minutes: float | None
    processes: int
    _start: float = field(default_factory=time.monotonic)
    _pace: float = 0.0
    """Seconds a token in the last epoch."""

    def may_begin(self, config: SweepConfig, lesson: Lesson) -> bool:
        """Whether there is time for an epoch of the lesson."""
        if self.minutes is None:
            return True
        end = time.monotonic() + self._pace * epoch_tokens(config, lesson)
        return end - self._start <= 60 * self.minutes

    def epoch_done(self, run: Run, records: Sequence[Record]) -> None:
        """Log the last of the run's records."""
        last = records[-1]
        self._pace = last["seconds"] / last["tokens"]
        lesson = run.config.curriculum[last["lesson"]]
        left = tokens_left(run, records)
        of_others = sum(tokens_left(other, read_records(other)) for other in self.runs if other != run)
        logger.info(
            "%s | length %d epoch %d/%d | loss %s | accuracy %.4f | %s tokens/s | %s left, of all runs about %s",
            run.name,
            lesson.length,
            last["epoch"] + 1,
            lesson.epochs,
            "not finite" if last["train_loss"] is None else f"{last['train_loss']:.4f}",
            last["accuracy"],
            short_count(1 / self._pace),
            clock(left * self._pace),
            clock((left + of_others) * self._pace / self.processes),
        )


def sweep(
    configs: Sequence[SweepConfig], jobs: int, minutes: float | None, arguments: Sequence[str], worker_of: int | None
) -> int:
    """Work on the sweeps until all runs are finished or the time is over; -> exit code.

    Args:
        jobs: processes; more than one are started as `megatron-palimpsa ARGUMENTS`, which is to lead here again.
        minutes: see `work`.
        worker_of: this process is one of so many that were started that way.
    """
    runs = in_turn(configs)
    if worker_of is None:
        claim_folders(configs)
        logger.info("%d of %d runs are finished", len(runs) - len(unfinished(runs)), len(runs))
    if unfinished(runs):
        if jobs > 1 and worker_of is None:
            if code := work_in_processes(arguments, jobs):
                return code
        else:
            work(runs, minutes, worker_of or 1)
    return ExitCode.SAVED_AND_STOPPED if unfinished(runs) else ExitCode.COMPLETE
