"""`bench`: every case in one process, one record each."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import torch

from megatron_palimpsa import launcher, parallel
from megatron_palimpsa.bench.cases import Case
from megatron_palimpsa.bench.measure import measure
from megatron_palimpsa.bench.record import Record, RecordFile, complete, describe, table
from megatron_palimpsa.training.exit_codes import ExitCode
from megatron_palimpsa.training.memory import estimate_memory

logger = logging.getLogger(__name__)


def run_cases(cases: list[Case], *, warmup: int, steps: int, output: Path | None) -> ExitCode:
    """Measure the cases one after the other and report them, on every rank of a launch.

    A case without enough device memory is recorded as such. On one rank the next follows; on several the run ends
    there, because the others may be waiting for a rank that has given up.

    Raises:
        ConfigError: as `RecordFile`.
    """
    launcher.require_meeting_place()
    world_size = launcher.world_size()
    is_main = launcher.rank() == 0
    file = RecordFile(output) if output is not None and is_main else None
    records: list[Record] = []
    try:
        for case in cases:
            records.append(_measured(case, world_size, warmup, steps))
            if file is not None:
                file.write(records[-1])
            if records[-1]["status"] == "out of memory" and world_size > 1:
                break
    finally:
        if world_size == 1 or all(record["status"] == "ok" for record in records):
            parallel.destroy()
        if is_main and records:
            logger.info("%s", table(records))
    return ExitCode.COMPLETE


def _measured(case: Case, world_size: int, warmup: int, steps: int) -> Record:
    config = case.config
    record = describe(case, world_size, estimate_memory(config, world_size // config.parallel.replica_size))
    logger.info("Case %s: %s", case.name, record["overrides"] or "the stage as it is")
    try:
        measured = measure(config, warmup=warmup, steps=steps)
    except torch.OutOfMemoryError as error:
        logger.warning("case %s: out of memory: %s", case.name, str(error).split(". ")[0])
        return record | {"status": "out of memory"}
    if not math.isfinite(measured.loss):
        record["status"] = "loss not finite"
    return complete(record, measured)
