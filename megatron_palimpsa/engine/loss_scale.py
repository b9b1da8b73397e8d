"""What the loss is multiplied by so that gradients in float16 neither vanish nor overflow."""

from __future__ import annotations

import math

from megatron_palimpsa.config import LossScaleConfig


class LossScale:
    """A fixed scale, or one that follows the gradients.

    A dynamic scale is halved at the `hysteresis`-th overflow since it last grew and at each one after, down to
    `min_loss_scale`, and doubled at the step after every `loss_scale_window` in a row without one, as DeepSpeed
    does it.
    """

    def __init__(self, settings: LossScaleConfig) -> None:
        self._settings = settings
        self._dynamic = settings.loss_scale == 0.0
        self.scale = 2.0**settings.initial_scale_power if self._dynamic else settings.loss_scale
        self._good_steps = 0
        self._tolerated = settings.hysteresis - 1

    def update(self, grad_norm: float) -> None:
        """After a step whose unscaled gradients have this norm; not finite where one of them overflowed."""
        if not self._dynamic:
            return
        if math.isfinite(grad_norm):
            if self._good_steps and self._good_steps % self._settings.loss_scale_window == 0:
                self.scale *= 2.0
                self._tolerated = self._settings.hysteresis - 1
            self._good_steps += 1
            return
        self._good_steps = 0
        if self._tolerated:
            self._tolerated -= 1
        else:
            self.scale = max(self.scale / 2.0, self._settings.min_loss_scale)

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self._good_steps, "tolerated": self._tolerated}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on with a dynamic scale that was saved; a fixed one is the configuration's."""
        if self._dynamic:
            self.scale = float(state["scale"])
            self._good_steps = int(state["good_steps"])
            self._tolerated = int(state["tolerated"])
