"""Tokens a second and MFU that a run reports are those of the whole model over all devices."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.layout_table import Layout, Pipeline, stage
from helpers.training_runs import layout as joined
from helpers.workers import Workers

from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.engine.base import StepResult
from megatron_palimpsa.engine.flops import train_flops_per_token
from megatron_palimpsa.engine.megatron import MegatronEngine
from megatron_palimpsa.training import run_log
from megatron_palimpsa.training.metrics import read_records
from megatron_palimpsa.training.progress import Progress
from megatron_palimpsa.training.run_folder import RunFolder


def console_line(config: StageConfig, folder: Path, peak: float) -> str:
    """What this rank's console says of a step of two seconds on devices of `peak` FLOP/s."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron_palimpsa.training.console")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    device = SimpleNamespace(is_available=lambda: True, get_device_name=lambda: "a device")
    with joined(config), pytest.MonkeyPatch.context() as patch:
        engine = MegatronEngine(config)
        patch.setattr(run_log, "torch", SimpleNamespace(cuda=device))
        patch.setattr(run_log, "peak_flops", lambda name: peak)
        log = run_log.RunLog(config, RunFolder(folder), engine, None)
        progress = Progress("", step=1, tokens=128, interval_losses=[4.0], guard={"skipped": 0})
        log.step(progress, StepResult(loss=4.0, grad_norm=1.0, applied=True, tokens=100), lr=1e-3, seconds=2.0)
        log.close()
    logger.removeHandler(handler)
    [line] = lines
    return line


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(tp=2, sequence_parallel=True),
        Layout(pipeline=Pipeline(2, 2)),
        Layout(dp=2, distributed_optimizer=True),
        Layout(cp=2, pipeline=Pipeline(2, 1)),
    ],
    ids=lambda layout: layout.name,
)
def test_rate_and_mfu_are_of_the_whole_model(layout: Layout, four_processes: Workers, tmp_path: Path) -> None:
    config = stage(layout, logging={"interval": 1, "tensorboard": False})
    rate = config.train.global_batch_tokens / 2
    one_device_busy = rate * train_flops_per_token(stage(Layout()).model)
    lines = four_processes.run_on(layout.ranks, console_line, config, tmp_path, one_device_busy)
    for line in lines:
        assert "64 tokens/s" in line
        assert f"MFU {100 / layout.ranks:.1f} %" in line
    [record] = read_records(tmp_path / "metrics.jsonl")
    assert record["tokens_per_second"] == rate
