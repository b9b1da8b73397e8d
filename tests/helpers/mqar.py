"""Tiny sweeps over multi-query associative recall."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

TINY: dict[str, Any] = {
    "name": "tiny",
    "output_dir": "runs",
    "model": {
        "pattern": "PM",
        "hidden_size": 16,
        "vocab_size": 32,
        "seq_length": 32,
        "d_state": 4,
        "headdim": 8,
        "beta_rank": 4,
    },
    "task": {},
    "curriculum": [
        {"length": 8, "pairs": 2, "epochs": 3, "batch_size": 4},
        {"length": 16, "pairs": 3, "epochs": 2, "batch_size": 2},
    ],
    "train": {"examples": 9, "test_examples": 5, "warmup_steps": 2, "clip_grad": 1.0},
    "sweep": {"lrs": [0.01], "seeds": [0]},
}
"""2 steps an epoch, then 4."""


def write_recipe(folder: Path, name: str = "tiny", **changes: Any) -> Path:
    """A recipe in `folder` whose runs go to `folder/runs`; `changes` are merged into TINY's sections."""
    tree = {**TINY, "name": name, "output_dir": str(folder / "runs")}
    for section, values in changes.items():
        tree[section] = {**tree[section], **values} if isinstance(values, dict) else values
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
