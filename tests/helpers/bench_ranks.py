"""A rank of `bench` of which some run out of memory and the others wait for them; importable by new processes."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from megatron_palimpsa import cli, parallel
from megatron_palimpsa.bench import Plan, run
from megatron_palimpsa.config import StageConfig


def bench(arguments: list[str], environment: dict[str, str], error: Exception | None) -> None:
    """`bench ARGUMENTS`, whose second case ends with `error` on this rank, or never."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    with Path(f"{arguments[1]}.{environment['RANK']}").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    measure, calls = run.measure, []

    def measure_or_not(config: StageConfig, plan: Plan, **options: Any) -> Any:
        calls.append(config)
        if len(calls) == 1:
            return measure(config, plan, **options)
        parallel.initialize(config.parallel, config.seed)
        if error is not None:
            raise error
        time.sleep(600)

    run.measure = measure_or_not
    sys.exit(cli.main(arguments))
