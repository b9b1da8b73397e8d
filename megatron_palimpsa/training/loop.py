"""The training loop of a stage, from its first weights to its marker; all ranks run it together."""

from __future__ import annotations

import logging
import math
import time

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_palimpsa import launcher, parallel
from megatron_palimpsa.config import ConfigError, StageConfig
from megatron_palimpsa.engine.base import Engine
from megatron_palimpsa.engine.select import build_engine
from megatron_palimpsa.training import checkpoint, ranks
from megatron_palimpsa.training.console import clock
from megatron_palimpsa.training.data import StageData
from megatron_palimpsa.training.exit_codes import ExitCode
from megatron_palimpsa.training.guard import StepGuard
from megatron_palimpsa.training.progress import Progress
from megatron_palimpsa.training.run_folder import RunFolder
from megatron_palimpsa.training.run_log import RunLog
from megatron_palimpsa.training.stages import Source
from megatron_palimpsa.training.stop import StopControl, StopReason
from megatron_palimpsa.training.validation import validate
from megatron_palimpsa.training.watchdog import Watchdog

logger = logging.getLogger(__name__)


def train_stage(
    config: StageConfig, folder: RunFolder, source: Source | None, data: StageData, stop: StopControl
) -> ExitCode:
    """Train a checked stage to its end, or until it is told to stop.

    Args:
        folder: of the stage; its newest checkpoint is gone on from.
        source: where the first weights come from if there is no checkpoint yet; None draws them from the seed.

    Raises:
        ConfigError: the checkpoint belongs to another model or other data, or is damaged.
    """
    try:
        with parallel.leaving():
            parallel.initialize(config.parallel, config.seed)
            run = _Run(config, folder, source, data, stop)
            try:
                with run.watchdog:
                    code = run.train()
            except BaseException as error:
                run.log.close()  # what was recorded so far stays
                run.checkpoints.leave(complete=isinstance(error, Exception))
                if parallel.is_alone():
                    run.checkpoints.close()
                raise
            run.checkpoints.close()
            return code
    except checkpoint.CheckpointError as error:
        # What all ranks know, one says.
        if launcher.rank() == 0 or not isinstance(error, checkpoint.SaveError):
            logger.error("%s", error)
        return ExitCode.FAILED


class _Run:
    """The parts of a running stage."""

    def __init__(
        self, config: StageConfig, folder: RunFolder, source: Source | None, data: StageData, stop: StopControl
    ) -> None:
        checkpoint.require_shared(folder.checkpoints)
        self.config = config
        self.folder = folder
        self.data = data
        self.valid_batches = data.valid_batches()
        self.stop = stop
        self.engine: Engine = build_engine(config)
        train = config.train
        self.guard = StepGuard(train.max_grad_norm_ratio, train.max_loss_rise, train.max_bad_steps)
        resumed = self._resume()
        self.progress = resumed or self._start(source)
        resumed_step = None if resumed is None else resumed.step
        self.checkpoints = checkpoint.Checkpointer(
            folder.checkpoints, self.engine, config.checkpoint.keep, config.checkpoint.async_save, resumed_step
        )
        self.checkpoints.reserve()
        self.log = RunLog(config, folder, self.engine, resumed_step)
        # One rank alone waits for nobody.
        self.watchdog = Watchdog(train.watchdog_seconds if dist.get_world_size() > 1 else None)
        self._clock_start = time.monotonic() - self.progress.seconds

    def train(self) -> ExitCode:
        """The loop: step, log, evaluate, save, until the tokens are done or a reason to stop comes up."""
        config, progress = self.config, self.progress
        logger.info(
            "Stage %s: %d parameters, %d steps of %d tokens, into %s",
            config.name,
            self.engine.num_parameters,
            config.total_steps,
            config.train.global_batch_tokens,
            self.folder.path,
        )
        batches = self.data.train_batches(
            progress.consumed_sequences,
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_data_parallel_world_size(),
        )
        if progress.first_valid_loss is None and not self._evaluate():
            return self._give_up(f"the validation loss is {progress.valid_loss}")
        due = False
        while progress.step < config.total_steps:
            self.checkpoints.poll()
            reason = self.stop.reason(progress.step, progress.tokens, ranks.largest)
            if reason > StopReason.SAVE:
                return self._save_and_stop(str(reason))
            due = due or reason is StopReason.SAVE
            start = time.monotonic()
            result = self.engine.train_step(batches, self.guard.accept)
            self.watchdog.beat()
            self._advance(result.loss, result.applied)
            self.log.step(progress, result, self.engine.learning_rate, time.monotonic() - start)
            if self.guard.exhausted:
                return self._give_up(
                    f"{self.guard.in_row} steps in a row were skipped (train.max_bad_steps), the last one for its "
                    f"{self.guard.last_refusal}"
                )
            last = progress.step == config.total_steps
            if (last or progress.step % config.train.eval_interval == 0) and not self._evaluate():
                return self._give_up(f"the validation loss is {progress.valid_loss}")
            due = due or last or progress.step % config.checkpoint.interval == 0
            # While steps are refused the weights may be the reason: they must not push out those from before.
            if due and (last or not self.guard.in_row):
                self._save()
                due = False
        return self._finish()

    def _resume(self) -> Progress | None:
        """Restore the newest usable checkpoint of this stage; None where there is none yet."""
        started = self.folder.has_checkpoints
        path = checkpoint.latest(self.folder.checkpoints)
        if path is None:
            if started:
                raise ConfigError(
                    f"{self.folder.checkpoints}: no checkpoint is intact; restore its files, or remove "
                    f"{self.folder.path} to start anew"
                )
            return None
        saved = Progress.from_dict(checkpoint.read_progress(path))
        if saved.fingerprint != self.data.fingerprint:
            raise ConfigError(
                f"data.train_blend={self.config.data.train_blend!r}: {path} was trained on other data "
                f"({self.data.changes_since(saved.data)}), in which its position means nothing; restore the blend and "
                f"its sets, or give the stage another name: it then starts at the first sequence, and from these "
                f"weights where this stage has come to its end (init_from.stage={self.folder.path.name!r})"
            )
        checkpoint.load(path, self.engine, what="everything")
        self.guard.load_state_dict(saved.guard)
        logger.info("Resuming from %s at step %d of %d", path, saved.step, self.config.total_steps)
        return saved

    def _start(self, source: Source | None) -> Progress:
        if source is not None:
            if checkpoint.latest(source.checkpoint.parent) != source.checkpoint:
                raise ConfigError(f"init_from: the last checkpoint {source.checkpoint} of that stage is damaged")
            checkpoint.load(source.checkpoint, self.engine, what=source.load)
            logger.info("Starting with the %s of %s", source.load, source.checkpoint)
        return Progress(fingerprint=self.data.fingerprint, data=self.data.recipe, guard=self.guard.state_dict())

    def _advance(self, loss: float, applied: bool) -> None:
        progress = self.progress
        progress.step += 1
        progress.consumed_sequences += self.config.global_batch_size
        progress.tokens += self.config.train.global_batch_tokens
        progress.seconds = time.monotonic() - self._clock_start
        progress.guard = self.guard.state_dict()
        if applied:
            progress.interval_losses.append(loss)
        elif ranks.is_main():
            logger.warning("step %d skipped: %s", progress.step, self.guard.last_refusal)

    def _evaluate(self) -> bool:
        """Validate and record; whether the loss is a finite number."""
        validation = validate(self.engine, self.valid_batches)
        self.progress.valid_loss = validation.loss
        if self.progress.first_valid_loss is None:
            self.progress.first_valid_loss = validation.loss
        self.log.valid(self.progress, validation)
        self.watchdog.beat()
        return math.isfinite(validation.loss)

    def _save(self) -> None:
        progress = self.progress
        progress.seconds = time.monotonic() - self._clock_start
        progress.peak_memory_bytes = max(progress.peak_memory_bytes, ranks.largest(self.engine.peak_memory_bytes()))
        self.log.sync()
        self.checkpoints.save(progress.step, progress.to_dict())
        self.watchdog.beat()

    def _save_and_stop(self, reason: str) -> ExitCode:
        self._save()
        self.checkpoints.finish()
        logger.info("%s: saved at step %d of %d", reason, self.progress.step, self.config.total_steps)
        self._close()
        return ExitCode.SAVED_AND_STOPPED

    def _give_up(self, reason: str) -> ExitCode:
        # Not saved: the last checkpoint, from before these steps, is the better place to go on from.
        failed = None
        try:
            self.checkpoints.finish()
        except checkpoint.SaveError as error:
            failed = error
        if ranks.is_main():
            if failed is not None:
                logger.error("%s", failed)
            logger.error(
                "%s; stopping at step %d. Checkpoint to go on from: %s",
                reason,
                self.progress.step,
                "none" if self.checkpoints.saved_step is None else f"step {self.checkpoints.saved_step}",
            )
        self._close()
        return ExitCode.NUMERICAL_STOP

    def _finish(self) -> ExitCode:
        progress = self.progress
        self.checkpoints.finish()
        self.log.end(progress)
        if ranks.is_main():
            self.folder.write_marker(
                {
                    "steps": progress.step,
                    "tokens": progress.tokens,
                    "seconds": progress.seconds,
                    "valid_loss_before": progress.first_valid_loss,
                    "valid_loss_after": progress.valid_loss,
                    "skipped_steps": self.guard.skipped,
                    "peak_memory_bytes": progress.peak_memory_bytes,
                    "checkpoint": f"checkpoints/step-{progress.step}",
                }
            )
        logger.info(
            "Stage %s is complete: %d steps, %d tokens, %s, validation loss %.4f -> %.4f",
            self.config.name,
            progress.step,
            progress.tokens,
            clock(progress.seconds),
            progress.first_valid_loss,
            progress.valid_loss,
        )
        self._close()
        return ExitCode.COMPLETE

    def _close(self) -> None:
        self.log.close()
        # A launcher ends the others when one process ends: nobody leaves before the main one has written everything.
        dist.barrier()
