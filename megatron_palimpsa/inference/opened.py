"""A stage's model as it was saved, without the engine that trained it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.core.models.hybrid.hybrid_model import HybridModel
from palimpsa_data import tokenizers
from palimpsa_data.tokenizers import Tokenizer

from megatron_palimpsa import parallel
from megatron_palimpsa.config import ConfigError, ParallelConfig, StageConfig, load_stage
from megatron_palimpsa.engine.optimizer_state import load_weights, locals_of
from megatron_palimpsa.model import build_model
from megatron_palimpsa.training import checkpoint
from megatron_palimpsa.training.checkpoint_files import fault
from megatron_palimpsa.training.checkpoint_format import Reader
from megatron_palimpsa.training.checkpoint_state import require_same_model
from megatron_palimpsa.training.run_folder import RunFolder


@dataclass(frozen=True)
class Opened:
    """What `opened` gives."""

    model: HybridModel
    """In evaluation mode, whole, on the GPU where there is one."""
    config: StageConfig
    """Of the stage, on one process."""
    tokenizer: Tokenizer | None
    """None where the stage names none."""
    checkpoint: Path
    """Where the weights were read."""


@contextmanager
def opened(
    source: Path, precision: Literal["bf16", "fp32"] | None = None, tokenizer: Path | None = None
) -> Iterator[Opened]:
    """The model in a stage's folder, by its newest intact checkpoint; complete or not.

    Process groups of this one process exist in the meantime.

    Args:
        source: the stage's folder, or one of its checkpoints (`checkpoints/step-N`).
        precision: of the weights; None is the stage's own. What is marked fp32 stays so.
        tokenizer: its file, in place of the stage's.

    Raises:
        ConfigError: the folder holds no stage, or no intact checkpoint.
        DataError: the tokenizer cannot be read.
    """
    folder, path = _locate(source)
    config = load_stage(folder.config)
    config = dataclasses.replace(
        config,
        parallel=ParallelConfig(distributed_optimizer=False),
        train=dataclasses.replace(config.train, precision=precision or config.train.precision, recompute="none"),
    )
    require_same_model(path, config.model)
    tokenizer_file = tokenizer or (Path(config.data.tokenizer) if config.data.tokenizer else None)
    loaded_tokenizer = None if tokenizer_file is None else tokenizers.load(tokenizer_file)
    parallel.initialize(config.parallel, config.seed)
    try:
        model = build_model(config).eval()
        load_weights([], locals_of([model]), Reader(path).read)
        yield Opened(model, config, loaded_tokenizer, path)
    finally:
        parallel.destroy()


def _locate(source: Path) -> tuple[RunFolder, Path]:
    if source.name.startswith("step-") and source.parent.name == "checkpoints":
        if (found := fault(source)) is not None:
            raise ConfigError(f"checkpoint {source} is damaged: {found}")
        return RunFolder(source.parent.parent), source
    folder = RunFolder(source)
    if not folder.config.is_file():
        raise ConfigError(f"{source}: holds no stage ({folder.config.name} is missing)")
    if (path := checkpoint.latest(folder.checkpoints)) is None:
        raise ConfigError(f"{folder.checkpoints}: holds no intact checkpoint")
    return folder, path
