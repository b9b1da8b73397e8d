"""Stages before and behind a surgery, trained a few steps on every rank."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from helpers.training_runs import always, build_engine, layout, share_of_batches
from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.training import checkpoint
from megatron_palimpsa.training.run_folder import RunFolder
from megatron_palimpsa.training.stages import find_source


def train_to_its_end(config: StageConfig, steps: int) -> None:
    """Leave a complete stage of so many steps."""
    with layout(config):
        engine = build_engine(config)
        batches = share_of_batches(config, 0)
        for _ in range(steps):
            engine.train_step(batches, always)
        run = RunFolder(config.folder)
        checkpoint.save(run.checkpoints, steps, engine, {"tokens": 64 * steps}, keep=2)
        if dist.get_rank() == 0:
            run.write_config(config)
            run.write_marker({"steps": steps, "tokens": 0, "seconds": 0.0, "checkpoint": f"checkpoints/step-{steps}"})


def go_on(config: StageConfig, steps: int, loaded: Path) -> list[float]:
    """Losses of so many steps from `init_from`; what was loaded is saved as `loaded/step-1`."""
    source = find_source(config)
    assert source is not None
    with layout(config):
        engine = build_engine(config)
        checkpoint.load(source.checkpoint, engine, what=source.load)
        checkpoint.save(loaded, 1, engine, {}, keep=2)
        batches = share_of_batches(config, 10)
        return [engine.train_step(batches, always).loss for _ in range(steps)]
