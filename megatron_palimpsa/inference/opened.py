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
from megatron_palimpsa.config import ParallelConfig, StageConfig, load_stage
from megatron_palimpsa.engine.boxes import ReadBox
from megatron_palimpsa.engine.optimizer_state import load_weights, locals_of
from megatron_palimpsa.export.reading import Exported, is_export, open_export
from megatron_palimpsa.model import build_model
from megatron_palimpsa.training.checkpoint_format import Reader
from megatron_palimpsa.training.checkpoint_state import require_same_model
from megatron_palimpsa.training.saved import find_saved, folder_of, is_stage


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
    """The model in a stage's folder, by its newest intact checkpoint, complete or not; or an exported model.

    Process groups of this one process exist in the meantime.

    Args:
        source: the stage's folder, one of its checkpoints (`checkpoints/step-N`), or what `export` wrote.
        precision: of the weights; None is the stage's own. What is marked fp32 stays so.
        tokenizer: its file, in place of the stage's.

    Raises:
        ConfigError: the folder holds neither a stage nor an exported model, or no intact checkpoint.
        DataError: the tokenizer cannot be read.
    """
    config, read, path = _find(source)
    loaded_tokenizer = load_tokenizer(config, tokenizer)
    config = dataclasses.replace(
        config,
        parallel=ParallelConfig(distributed_optimizer=False),
        train=dataclasses.replace(config.train, precision=precision or config.train.precision, recompute="none"),
    )
    parallel.initialize(config.parallel, config.seed)
    try:
        model = build_model(config).eval()
        load_weights([], locals_of([model]), read)
        yield Opened(model, config, loaded_tokenizer, path)
    finally:
        parallel.destroy()


def settings_of(source: Path) -> StageConfig:
    """The configuration of the model that `opened` gives, without a look at a stage's checkpoints.

    Raises:
        ConfigError: the folder holds neither a stage nor an exported model.
    """
    if not is_stage(source) and is_export(source):
        return _exported_stage(source, open_export(source))
    return load_stage(folder_of(source).config)


def load_tokenizer(config: StageConfig, tokenizer: Path | None = None) -> Tokenizer | None:
    """That of a stage, or the one in the file `tokenizer` in its place; None where there is neither.

    Raises:
        DataError: it cannot be read.
    """
    file = tokenizer or (Path(config.data.tokenizer) if config.data.tokenizer else None)
    return None if file is None else tokenizers.load(file)


def _find(source: Path) -> tuple[StageConfig, ReadBox, Path]:
    """The model's configuration, what reads its weights, and where they lie."""
    if not is_stage(source) and is_export(source):
        exported = open_export(source)
        return _exported_stage(source, exported), exported.read, source
    folder, path = find_saved(source)
    config = load_stage(folder.config)
    require_same_model(path, config.model)
    return config, Reader(path).read, path


def _exported_stage(source: Path, exported: Exported) -> StageConfig:
    # Its own name need not be one of a stage.
    config = exported.stage(source.parent / "exported")
    return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=str(exported.tokenizer or "")))
