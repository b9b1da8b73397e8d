"""The runs of one or several sweeps, one after the other; any number of processes may work on the same folders.

Each process takes the next run that is neither finished nor held by another. A step of a run this small is some hundred
short kernels, whose launches the GPU waits for: processes that share it have an interpreter each to launch from, and
the model stays as it is. Streams of one process would share its interpreter; heads of several runs in one scan, or
models stacked under `vmap`, would need layers and kernels of their own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_palimpsa.engine.installed import require_layers
from megatron_palimpsa.experiments.mqar.config import Lesson, SweepConfig
from megatron_palimpsa.experiments.mqar.folders import claim_folders
from megatron_palimpsa.experiments.mqar.records import (
    Record,
    Run,
    epoch_tokens,
    has_diverged,
    read_records,
    read_result,
    runs_of,
    tokens_left,
)
from megatron_palimpsa.lifeline import tied_process
from megatron_palimpsa.training.console import clock, short_count
from megatron_palimpsa.training.exit_codes import ExitCode

logger = logging.getLogger(__name__)


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
        trained = True
        # Again as long as that took time: who held a run may have been killed meanwhile.
        while trained:
            trained = False
            for run in unfinished(runs):
                with run.locked() as mine:
                    if not mine or read_result(run) is not None:
                        continue
                    if not train_run(run, progress):
                        return
                    trained = True


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
            "not finite" if has_diverged(last) else f"{last['train_loss']:.4f}",
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
        jobs: processes, no more than runs; more than one are started as `megatron-palimpsa ARGUMENTS`, which is to
            lead here again.
        minutes: see `work`.
        worker_of: this process is one of so many that were started that way.
    """
    runs = in_turn(configs)
    if worker_of is None:
        for config in configs:
            require_layers(config.model)
        claim_folders(configs)
        logger.info("%d of %d runs are finished", len(runs) - len(unfinished(runs)), len(runs))
    if left := unfinished(runs):
        jobs = min(jobs, len(left))
        if jobs > 1 and worker_of is None:
            if code := work_in_processes([*arguments, "--worker-of", str(jobs)], jobs):
                return code
        else:
            work(runs, minutes, worker_of or 1)
    if not (left := unfinished(runs)):
        return ExitCode.COMPLETE
    if worker_of is None:
        logger.info("%d of %d runs are left: the same command goes on with them", len(left), len(runs))
    return ExitCode.SAVED_AND_STOPPED
