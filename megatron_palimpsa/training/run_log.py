"""Everything a run tells: records, curves and console lines, from the main process only."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.engine.base import Engine, StepResult
from megatron_palimpsa.training import ranks
from megatron_palimpsa.training.console import Console, peak_flops
from megatron_palimpsa.training.metrics import MetricsFile, TensorBoard
from megatron_palimpsa.training.progress import Progress
from megatron_palimpsa.training.run_folder import RunFolder
from megatron_palimpsa.training.validation import Validation
from megatron_palimpsa.training.wandb_log import WandbLog


class Sink(Protocol):
    """A place for records."""

    def write(self, kind: str, **values: Any) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


class RunLog:
    """Writes each record to every sink (none on the other ranks) and logs a line for the console."""

    def __init__(self, config: StageConfig, folder: RunFolder, engine: Engine, resumed_step: int | None) -> None:
        """`resumed_step` None: the stage starts anew."""
        self._config = config
        self._console = Console(
            config.total_steps, config.train.global_batch_tokens, engine.model_flops_per_token, _peak_of_all_devices()
        )
        self._sinks = _open_sinks(config, folder, resumed_step) if ranks.is_main() else []
        self._steps = 0
        self._seconds = 0.0
        if resumed_step is not None:
            self._write("resume", step=resumed_step)

    def step(self, progress: Progress, result: StepResult, lr: float, seconds: float) -> None:
        """Count a step that took `seconds`; every `logging.interval` steps and at the last write a `train` record.

        The record's loss is the mean over the interval's accepted steps, its lr and gradient norm are the last step's.
        """
        self._steps += 1
        self._seconds += seconds
        if progress.step % self._config.logging.interval and progress.step < self._config.total_steps:
            return
        rate = self._steps * self._config.train.global_batch_tokens / self._seconds
        loss = progress.take_interval_loss()
        skipped = progress.guard["skipped"]
        self._write(
            "train",
            step=progress.step,
            tokens=progress.tokens,
            loss=loss,
            lr=lr,
            grad_norm=result.grad_norm,
            tokens_per_second=rate,
            seconds=progress.seconds,
            skipped_steps=skipped,
        )
        self._console.train(progress.step, loss, lr, result.grad_norm, rate, skipped)
        self._steps, self._seconds = 0, 0.0

    def valid(self, progress: Progress, validation: Validation) -> None:
        self._write(
            "valid",
            step=progress.step,
            tokens=progress.tokens,
            loss=validation.loss,
            position_edges=validation.position_edges,
            loss_by_position=validation.loss_by_position,
            memory=validation.memory,
        )
        self._console.valid(progress.step, validation.loss)

    def end(self, progress: Progress) -> None:
        self._write(
            "end",
            step=progress.step,
            tokens=progress.tokens,
            seconds=progress.seconds,
            peak_memory_bytes=progress.peak_memory_bytes,
        )

    def sync(self) -> None:
        """Records reach the disk before the checkpoint that follows them."""
        for sink in self._sinks:
            sink.sync()

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def _write(self, kind: str, **values: Any) -> None:
        for sink in self._sinks:
            sink.write(kind, **values)


def _open_sinks(config: StageConfig, folder: RunFolder, resumed_step: int | None) -> list[Sink]:
    sinks: list[Sink] = [MetricsFile(folder.metrics, resumed_step)]
    if config.logging.tensorboard:
        sinks.append(TensorBoard(folder.tensorboard, resumed_step))
    if config.logging.wandb_project is not None:
        sinks.append(WandbLog(config, folder.path))
    return sinks


def _peak_of_all_devices() -> float | None:
    if not torch.cuda.is_available():
        return None
    peak = peak_flops(torch.cuda.get_device_name())
    return None if peak is None else peak * dist.get_world_size()
