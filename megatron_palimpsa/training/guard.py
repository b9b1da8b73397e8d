"""Refuse optimizer steps whose loss or gradient norm says that they would do harm."""

from __future__ import annotations

import math
import statistics
from typing import Any

_WINDOW = 128
_MIN_HISTORY = 16


class StepGuard:
    """Judges every step before the optimizer takes it, and counts what it refused.

    A step is refused when its loss or gradient norm is not finite, or when the norm exceeds `max_ratio` times the
    median of the last 128 accepted norms (judged from 16 accepted steps on). The state is part of a checkpoint, so
    that a resumed run judges as an unbroken one does. All ranks see the same loss and norm and so decide alike.
    """

    def __init__(self, max_ratio: float | None, max_in_row: int) -> None:
        self.max_ratio = max_ratio
        self.max_in_row = max_in_row
        self.skipped = 0
        self.in_row = 0
        self.last_refusal = ""
        self._norms: list[float] = []

    def accept(self, loss: float, grad_norm: float) -> bool:
        """Whether the optimizer may take this step; called once a step."""
        self.last_refusal = self._objection(loss, grad_norm)
        if self.last_refusal:
            self.skipped += 1
            self.in_row += 1
            return False
        self.in_row = 0
        self._norms = [*self._norms, grad_norm][-_WINDOW:]
        return True

    @property
    def exhausted(self) -> bool:
        """Whether so many steps in a row were refused that the run must stop."""
        return self.in_row >= self.max_in_row

    def _objection(self, loss: float, grad_norm: float) -> str:
        if not math.isfinite(loss):
            return f"loss {loss}"
        if not math.isfinite(grad_norm):
            return f"gradient norm {grad_norm}"
        if self.max_ratio is not None and len(self._norms) >= _MIN_HISTORY:
            median = statistics.median(self._norms)
            if grad_norm > self.max_ratio * median:
                return f"gradient norm {grad_norm:.4g}, above {self.max_ratio:g} x the running median {median:.4g}"
        return ""

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped, "in_row": self.in_row, "norms": self._norms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped = state["skipped"]
        self.in_row = state["in_row"]
        self._norms = list(state["norms"])
