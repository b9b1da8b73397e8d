"""Stages trained for some steps in this process, saved as `train` saves them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from helpers.logits import random_weights
from helpers.training_runs import always, build_engine, layout, share_of_batches
from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.engine.boxes import Box
from megatron_palimpsa.inference import opened
from megatron_palimpsa.training import checkpoint
from megatron_palimpsa.training.progress import Progress
from megatron_palimpsa.training.run_folder import RunFolder
from megatron_palimpsa.training.stages import find_source


def train_and_save(config: StageConfig, steps: int = 5) -> Path:
    """Train from the stage's source, or from random weights; -> the stage's folder."""
    run = RunFolder(config.folder)
    source = find_source(config)
    with layout(config):
        engine = build_engine(config)
        if source is None:
            engine.load_weights(_random)
        else:
            checkpoint.load(source.checkpoint, engine, what=source.load)
        batches = share_of_batches(config, 0)
        for _ in range(steps):
            engine.train_step(batches, always)
        run.path.mkdir(parents=True, exist_ok=True)
        run.write_config(config)
        checkpoint.save(run.checkpoints, steps, engine, Progress("", step=steps).to_dict(), keep=2)
    return run.path


def _random(box: Box, out: Tensor) -> None:
    part = tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))
    out.copy_(random_weights(box.key, list(box.whole))[part])


@torch.no_grad()
def trainer_logits(folder: Path, tokens: Tensor) -> Tensor:
    """[B, T, vocabulary] in float32, each row by itself."""
    with opened(folder, "fp32") as it:
        rows = [it.model(input_ids=row[None], position_ids=None, attention_mask=None) for row in tokens]
        return torch.cat(rows)[..., : it.config.model.vocab_size]
