"""The line a person watches."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

# Dense bf16 peak of one device in FLOP/s, from the makers' data sheets; the first name that fits counts.
_PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
}


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU by its name; None for one that is not in the table."""
    return next((flops for name, flops in _PEAK_FLOPS.items() if name in device_name), None)


class Console:
    """Logs one line a `train` or `valid` record through the package's logger."""

    def __init__(self, total_steps: int, global_batch_tokens: int, flops_per_token: float, peak: float | None) -> None:
        """`peak`: FLOP/s of all devices together; None leaves the MFU out."""
        self._total_steps = total_steps
        self._global_batch_tokens = global_batch_tokens
        self._flops_per_token = flops_per_token
        self._peak = peak

    def train(self, step: int, loss: float | None, lr: float, grad_norm: float, rate: float, skipped: int) -> None:
        """`rate` in tokens a second over all ranks."""
        parts = [
            f"step {step}/{self._total_steps}",
            "loss -" if loss is None else f"loss {loss:.4f}",
            f"lr {lr:.2e}",
            f"grad norm {grad_norm:.3g}",
            f"{short_count(rate)} tokens/s",
        ]
        if self._peak is not None:
            parts.append(f"MFU {100 * rate * self._flops_per_token / self._peak:.1f} %")
        if skipped:
            parts.append(f"{skipped} skipped")
        left = (self._total_steps - step) * self._global_batch_tokens / rate
        logger.info(" | ".join([*parts, f"{clock(left)} left"]))

    def valid(self, step: int, loss: float) -> None:
        logger.info("step %d/%d | validation loss %.4f", step, self._total_steps, loss)


def short_count(value: float) -> str:
    """12345 -> 12.3K."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def clock(seconds: float) -> str:
    """3725 -> 1:02:05."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
