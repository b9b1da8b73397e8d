"""A finished stage's folder with invented records, as `train` would leave it."""

from __future__ import annotations

import json
import math
from typing import Any

from megatron_palimpsa.config import IMPORTANCE_SYMBOLS, MIXER_SYMBOLS, StageConfig, save_resolved
from megatron_palimpsa.training.run_folder import RunFolder


def write_finished_stage(
    config: StageConfig, *, first_loss: float, last_loss: float, steps: int = 40, tokens_per_step: int = 1000
) -> None:
    """Losses fall evenly from `first_loss` to `last_loss`; 500 tokens/s, 250 in the second half; 300 MiB."""
    run = RunFolder(config.folder)
    run.path.mkdir(parents=True, exist_ok=True)
    save_resolved(config, run.config)
    records: list[dict[str, Any]] = []
    for step in range(0, steps + 1, 10):
        loss = first_loss + (last_loss - first_loss) * step / steps
        base = {"step": step, "tokens": step * tokens_per_step, "loss": loss}
        if step:
            rate = 500.0 if step <= steps // 2 else 250.0
            records.append({"kind": "train", **base, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_second": rate})
        records.append({"kind": "valid", **base, **_by_position(loss, config), "memory": _memory(step, config)})
    records.insert(3, {"kind": "resume", "step": 10})
    end = {"kind": "end", "step": steps, "tokens": steps * tokens_per_step, "seconds": 99.0}
    records.append({**end, "peak_memory_bytes": 300 * 2**20})
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    run.write_marker(
        {"steps": steps, "tokens": end["tokens"], "seconds": 99.0, "checkpoint": f"checkpoints/step-{steps}"}
    )


def _by_position(loss: float, config: StageConfig) -> dict[str, Any]:
    edges = [0, 16, 32, 64, 128, config.model.seq_length]
    losses: list[float | None] = [loss + 1.5 / (1 + place) for place in range(len(edges) - 2)]
    return {"position_edges": edges, "loss_by_position": [*losses, None if loss > 5 else loss - 0.2]}


def _memory(step: int, config: StageConfig) -> dict[str, dict[str, float]]:
    memory = {}
    for number, symbol in enumerate(config.model.layers, 1):
        if symbol in MIXER_SYMBOLS:
            memory[str(number)] = {"window": 20.0 * number * math.exp(step / 40)}
        if symbol in IMPORTANCE_SYMBOLS:
            memory[str(number)]["importance_ratio"] = 0.5 + step / 20
    return memory
