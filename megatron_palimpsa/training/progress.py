"""How far a stage has come: what a checkpoint keeps beside the engine's own state."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """Saved as plain JSON values; every field restores exactly, so that a resumed run repeats an unbroken one."""

    fingerprint: str
    """Of the training data; a checkpoint goes on only with the same."""
    data: dict[str, Any] = field(default_factory=dict)
    """What the fingerprint is of, so that a refusal can say what has changed."""
    step: int = 0
    consumed_sequences: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """Wall-clock of the loop, over all processes of the stage."""
    interval_losses: list[float] = field(default_factory=list)
    """Losses of the accepted steps since the last `train` record."""
    first_valid_loss: float | None = None
    """Before the first step."""
    valid_loss: float | None = None
    peak_memory_bytes: int = 0
    """Of the rank that used most, over all processes of the stage."""
    guard: dict[str, Any] = field(default_factory=dict)

    def take_interval_loss(self) -> float | None:
        """Mean of `interval_losses`, None without any; the next interval starts empty."""
        losses, self.interval_losses = self.interval_losses, []
        return sum(losses) / len(losses) if losses else None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Progress:
        # Earlier checkpoints hold the fingerprint alone.
        values = {"data": {}} | values
        return cls(**{item.name: values[item.name] for item in dataclasses.fields(cls)})
