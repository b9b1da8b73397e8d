"""How far a stage has come: what a checkpoint keeps beside the engine's own state."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """Saved as plain JSON values; every field restores exactly, so that a resumed run repeats an unbroken one."""

    step: int = 0
    consumed_sequences: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """Wall-clock spent in training steps, over all processes of the stage."""
    interval_losses: list[float] = field(default_factory=list)
    """Losses of the accepted steps since the last `train` record."""
    first_valid_loss: float | None = None
    valid_loss: float | None = None
    peak_memory_bytes: int = 0
    guard: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Progress:
        return cls(**{item.name: values[item.name] for item in dataclasses.fields(cls)})
