"""`train` and `train --dry-run`: everything that can be refused is refused here, before an engine is built."""

from __future__ import annotations

import contextlib
import logging
import os

from megatron_palimpsa import launcher
from megatron_palimpsa.config import ConfigError, StageConfig, check_stage
from megatron_palimpsa.engine.installed import require_engine, require_layers
from megatron_palimpsa.training import advice, plan
from megatron_palimpsa.training.console import clock
from megatron_palimpsa.training.data import StageData
from megatron_palimpsa.training.exit_codes import ExitCode
from megatron_palimpsa.training.run_folder import RunFolder
from megatron_palimpsa.training.stages import Source, find_source, named_source
from megatron_palimpsa.training.stop import StopControl
from megatron_palimpsa.training.wandb_log import check_usable

logger = logging.getLogger(__name__)

_LOCK_PATIENCE = 120.0


def train(config: StageConfig) -> ExitCode:
    """Train the stage, or go on where it stopped; on every rank.

    Raises:
        ConfigError: the input is wrong, or another process trains this stage.
    """
    folder = RunFolder(config.folder)
    check_stage(config, launcher.world_size())
    folder.check_config(config)
    if done := folder.read_marker():
        logger.info(
            "Stage %s is complete already: %d steps, %d tokens, %s (%s)",
            config.name,
            done["steps"],
            done["tokens"],
            clock(done["seconds"]),
            folder.marker,
        )
        return ExitCode.COMPLETE
    launcher.require_meeting_place()
    stop = StopControl(config.train, file=launcher.stop_file(), save_file=folder.save_now)
    source, data = _check_inputs(config, folder)
    require_layers(config.model)
    is_main = launcher.rank() == 0
    # Listening begins before the slow start: a signal during it is obeyed before the first step.
    # A job that is requeued may find ranks of its last attempt that have not noticed yet that their node is lost.
    patience = _LOCK_PATIENCE if launcher.is_requeued() else 0.0
    with stop.listening(), folder.locked(patience) if is_main else contextlib.nullcontext():
        if is_main:
            folder.write_config(config)
        from megatron_palimpsa.training.loop import train_stage

        return train_stage(config, folder, source, data, stop)


class NotReady(ConfigError):
    """A stage cannot start here; its plan, which depends on its configuration alone, is there all the same."""

    def __init__(self, message: str, plan: str) -> None:
        super().__init__(message)
        self.plan = plan


def dry_run(config: StageConfig, gpu_memory: int | None = None, ranks: int | None = None) -> str:
    """Check everything that `train` checks and describe what it would do.

    Args:
        gpu_memory: bytes of the GPUs that it is meant for; None takes those of this machine's.
        ranks: that the plan is for, on whatever machine; None takes those that a launcher started, or the fewest that
            the layout takes.

    Raises:
        NotReady: the stage it starts from or its data is missing or wrong, or something else that this machine lacks.
        ConfigError: otherwise as `train`.
    """
    if ranks is None:
        ranks = launcher.world_size() if launcher.is_launched() else config.parallel.replica_size
    gpu_memory = gpu_memory or advice.gpu_memory()
    try:
        return describe(config, ranks, gpu_memory=gpu_memory)
    except ConfigError as error:
        raise NotReady(str(error), _describe_unseen(config, ranks, gpu_memory)) from None


def _describe_unseen(config: StageConfig, ranks: int, gpu_memory: int | None) -> str:
    """`describe` without a look at data and source; what is wrong with the configuration itself is raised."""
    check_stage(config, ranks)
    RunFolder(config.folder).check_config(config)
    data = [f"{config.data.train_blend}: not checked"]
    return plan.describe(config, ranks, named_source(config), data, gpu_memory)


def describe(
    config: StageConfig,
    ranks: int,
    *,
    planned_source: Source | None = None,
    data_may_be_missing: bool = False,
    gpu_memory: int | None = None,
) -> str:
    """Check everything that `train` checks on `ranks` ranks and describe what it would do.

    Args:
        planned_source: what the stage will start from once the stage before it is complete; None looks for it now.
        data_may_be_missing: something before the stage makes it; it is checked only where its blends are there.

    Raises:
        ConfigError: as `train`.
    """
    folder = RunFolder(config.folder)
    check_stage(config, ranks)
    folder.check_config(config)
    if data_may_be_missing and not all(map(os.path.exists, (config.data.train_blend, config.data.valid_blend))):
        source = _check_start(config, folder, planned_source)
        return plan.describe(config, ranks, source, [f"{config.data.train_blend}: not made yet"], gpu_memory)
    source, data = _check_inputs(config, folder, planned_source)
    sets = [
        f"{item.name}: {100 * item.share:.1f} % of the sequences, {100 * item.fill:.1f} % filled, "
        f"{item.tokens:,} tokens, {item.epochs:.2f} epochs"
        for item in data.sources()
    ]
    return plan.describe(config, ranks, source, sets, gpu_memory)


def _check_inputs(
    config: StageConfig, folder: RunFolder, planned_source: Source | None = None
) -> tuple[Source | None, StageData]:
    source = _check_start(config, folder, planned_source)
    return source, StageData(config)


def _check_start(config: StageConfig, folder: RunFolder, planned_source: Source | None) -> Source | None:
    """All but the data."""
    check_usable(config)
    require_engine(config)
    source = planned_source or find_source(config)
    saves = config.total_steps // config.checkpoint.interval + 1
    folder.check_place(plan.checkpoint_bytes(config.model), min(config.checkpoint.keep, saves))
    return source
