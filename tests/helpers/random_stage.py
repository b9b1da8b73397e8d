"""A complete stage with random weights, made in this process without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.models import randomise
from helpers.runs import write_stage
from megatron_palimpsa import parallel
from megatron_palimpsa.config import load_stage
from megatron_palimpsa.convert.stage_folder import write_checkpoint
from megatron_palimpsa.engine.optimizer_state import locals_of
from megatron_palimpsa.model import build_model
from megatron_palimpsa.training.run_folder import RunFolder


def write_random_stage(folder: Path, data: Path, seed: int = 0, **changes: Any) -> Path:
    """`helpers.runs.STAGE`, changed, over the data of `make_data` -> the stage's folder, below `folder`."""
    config = load_stage(write_stage(folder, data, **changes))
    run = RunFolder(config.folder)
    run.path.mkdir(parents=True)
    parallel.initialize(config.parallel, config.seed)
    try:
        model = build_model(config)
        randomise(model, seed=seed)
        values = [
            (box, local.parameter.detach().float().cpu().reshape(-1)[place].reshape(box.shape))
            for local in locals_of([model])
            for box, place in local.boxes(0, local.numel, "")
        ]
    finally:
        parallel.destroy()
    write_checkpoint(run, config.model, values, elements=sum(box.numel for box, _ in values), step=8)
    run.write_config(config)
    run.write_marker({"steps": 8, "tokens": 512, "seconds": 1.0, "checkpoint": "checkpoints/step-8"})
    return run.path
