"""`bench`: every case in one process, one record each."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import torch

from megatron_palimpsa import launcher, parallel
from megatron_palimpsa.bench.agreement import agreement_lines
from megatron_palimpsa.bench.alarm import Alarm
from megatron_palimpsa.bench.cases import Case
from megatron_palimpsa.bench.measure import Plan, measure
from megatron_palimpsa.bench.picture import draw
from megatron_palimpsa.bench.record import Record, complete, describe
from megatron_palimpsa.bench.record_file import RecordFile, measured_before
from megatron_palimpsa.bench.table import saving_line, shares_line, table
from megatron_palimpsa.training import ranks
from megatron_palimpsa.training.exit_codes import ExitCode
from megatron_palimpsa.training.memory import estimate_memory

logger = logging.getLogger(__name__)

_OUT_OF_MEMORY = "out of memory"
_SIGNS = (_OUT_OF_MEMORY, "CUBLAS_STATUS_ALLOC_FAILED")
"""In the messages of PyTorch's allocator, of NCCL and of cuBLAS."""


def run_cases(cases: list[Case], plan: Plan, *, output: Path | None = None, save: Path | None = None) -> ExitCode:
    """Measure the cases one after the other and report them, on every rank of a launch.

    What `output` has of the same cases from before is shown again instead of being measured. With `save` each case's
    state is also saved in the background, to a folder of its name there.

    A case without enough device memory is recorded as such. On one rank the next follows; of several, whichever it
    was, every process ends there with exit code 1, because the others may be waiting for the one that has given up.

    Raises:
        ConfigError: as `RecordFile` and `measure`.
    """
    launcher.require_meeting_place()
    report = _Report(cases, plan, output, saves=save is not None)
    alarm = Alarm(report.give_up) if launcher.world_size() > 1 else None
    try:
        with parallel.leaving():
            parallel.join()
            for number in report.left():
                case, known = cases[number], report.known[number]
                logger.info("Case %s: %s", case.name, known["overrides"] or "the stage as it is")
                try:
                    folder = None if save is None else save / case.name
                    measured = measure(case.config, plan, save=folder)
                except RuntimeError as error:
                    if not any(sign in str(error) for sign in _SIGNS):
                        raise
                    logger.warning("case %s: out of memory: %s", case.name, str(error).split(". ")[0])
                    if alarm is not None:
                        alarm.sound(number)
                    report.add(known | {"status": _OUT_OF_MEMORY})
                    continue
                record = complete(known, measured)
                report.add(record if math.isfinite(measured.loss) else record | {"status": "loss not finite"})
    finally:
        report.show()
    return ExitCode.COMPLETE


class _Report:
    """What is known of the cases before they run, and the records of those that did; rank 0 writes and shows them."""

    def __init__(self, cases: list[Case], plan: Plan, output: Path | None, *, saves: bool) -> None:
        world_size = launcher.world_size()
        self.known = [
            describe(
                case, world_size, estimate_memory(case.config, world_size // case.config.parallel.replica_size), plan
            )
            for case in cases
        ]
        self._is_main = launcher.rank() == 0
        self._output = output
        self._file = RecordFile(output, list(self.known[0])) if output is not None and self._is_main else None
        before = [] if self._file is None else self._file.read()
        wanted = ["save_bytes"] * saves + ["share_other"] * (plan.profile and torch.cuda.is_available())
        self._before = [measured_before(known, wanted, before) for known in self.known]
        self._records: list[Record] = [record for record in self._before if record is not None]

    def left(self) -> list[int]:
        """Numbers of the cases that are to be measured, as rank 0 has them. Collective."""
        if self._records:
            logger.info("%d of %d cases are in %s already", len(self._records), len(self.known), self._output)
        return ranks.on_main(lambda: [number for number, record in enumerate(self._before) if record is None])

    def add(self, record: Record) -> None:
        self._records.append(record)
        if self._file is not None:
            self._file.write(record)

    def show(self) -> None:
        if not self._is_main or not self._records:
            return
        logger.info("%s", table(self._records))
        lines = [line(record) for record in self._records for line in (shares_line, saving_line)]
        for text in [*filter(None, lines), *agreement_lines(self._records)]:
            logger.info("%s", text)
        if self._output is not None:
            picture = self._output.with_suffix(".png")
            draw(self._records, picture)
            logger.info("Picture: %s", picture)

    def give_up(self, rank: int, number: int) -> None:
        """Rank `rank` of several has no memory for case `number`."""
        self.add(self.known[number] | {"status": _OUT_OF_MEMORY})
        self.show()
        if self._is_main:
            left = ", ".join(
                known["case"]
                for known, before in zip(self.known[number + 1 :], self._before[number + 1 :], strict=True)
                if before is None
            )
            how = (
                "the same command goes on with" if self._file else "not measured, to be started anew without this case"
            )
            logger.error(
                "case %s: rank %d is out of memory; all ranks end here, for others may be waiting for it%s",
                self.known[number]["case"],
                rank,
                f"; {how}: {left}" if left else "",
            )
