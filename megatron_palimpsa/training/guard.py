"""Refuse optimizer steps whose loss or gradient norm says that they would do harm."""

from __future__ import annotations

import math
import statistics
from typing import Any

_WINDOW = 128
_MIN_HISTORY = 16


class StepGuard:
    """Judges every step before the optimizer takes it, and counts what it refused.

    A step is refused when its loss or gradient norm is not finite, when the norm exceeds `max_norm_ratio` times the
    median of the last 128 accepted norms, or when the loss lies more than `max_loss_rise` nats above the median of
    the last 128 accepted losses (both judged from 16 accepted steps on; None: no bound). The state is part of a
    checkpoint, so that a resumed run judges as an unbroken one does. All ranks see the same loss and norm and so
    decide alike.
    """

    def __init__(self, max_norm_ratio: float | None, max_loss_rise: float | None, max_in_row: int) -> None:
        self.max_norm_ratio = max_norm_ratio
        self.max_loss_rise = max_loss_rise
        self.max_in_row = max_in_row
        self.skipped = 0
        self.in_row = 0
        self.last_refusal = ""
        self._norms: list[float] = []
        self._losses: list[float] = []

    def accept(self, loss: float, grad_norm: float) -> bool:
        """Whether the optimizer may take this step; called once a step."""
        self.last_refusal = self._objection(loss, grad_norm)
        if self.last_refusal:
            self.skipped += 1
            self.in_row += 1
            return False
        self.in_row = 0
        self._norms = [*self._norms, grad_norm][-_WINDOW:]
        self._losses = [*self._losses, loss][-_WINDOW:]
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
        if len(self._norms) < _MIN_HISTORY:
            return ""
        norm, level = statistics.median(self._norms), statistics.median(self._losses)
        if self.max_norm_ratio is not None and grad_norm > self.max_norm_ratio * norm:
            return f"gradient norm {grad_norm:.4g}, above {self.max_norm_ratio:g} x the running median {norm:.4g}"
        if self.max_loss_rise is not None and loss > level + self.max_loss_rise:
            return f"loss {loss:.4g}, more than {self.max_loss_rise:g} above the running median {level:.4g}"
        return ""

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped, "in_row": self.in_row, "norms": self._norms, "losses": self._losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped = state["skipped"]
        self.in_row = state["in_row"]
        self._norms = list(state["norms"])
        self._losses = list(state["losses"])
