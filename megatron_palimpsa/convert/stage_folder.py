"""A converted model as the folder of a complete stage, which appears by one rename."""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from palimpsa_data.tokenizers.json_file import TOKENIZER_CONFIG
from torch import Tensor

from megatron_palimpsa.config import ConfigError, ModelConfig, StageConfig, check_stage, stage_from_dict, write_yaml
from megatron_palimpsa.engine.boxes import Box
from megatron_palimpsa.training import checkpoint_files as files
from megatron_palimpsa.training.checkpoint_format import write_index, write_rank_file
from megatron_palimpsa.training.checkpoint_state import FORMAT_VERSION, fingerprint
from megatron_palimpsa.training.console import clock
from megatron_palimpsa.training.run_folder import RunFolder

logger = logging.getLogger(__name__)

MODEL_SECTION = "model.yaml"
_SEQ_LENGTH = 2048
"""Where the source gives none; no weight depends on it."""
AT_ONCE = 2**24
"""Elements read and written at once, 64 MiB in float32."""
_SAID_EVERY = 10.0
"""Seconds between two lines of progress."""


def untrained_stage(
    section: dict[str, Any],
    output: Path,
    tokenizer: Path | None,
    where: str,
    seed: int = StageConfig.seed,
    precision: Literal["bf16", "fp32"] = "bf16",
) -> StageConfig:
    """The configuration of a stage `output` that has weights and was not trained.

    Args:
        section: its `model:` section, where `seq_length` may be missing.
        tokenizer: the file that `complete` copies, whose name it takes over, with the settings beside it.
        where: of the model, for messages.
        precision: that the model is meant for; its checkpoint holds fp32.

    Raises:
        ConfigError: the section says no model.
    """
    model = {"seq_length": _SEQ_LENGTH, **section}
    tree = {
        "name": output.name,
        "output_dir": str(output.parent),
        "model": model,
        "data": {
            "train_blend": "",
            "valid_blend": "",
            "tokenizer": "" if tokenizer is None else str(output / tokenizer.name),
        },
        "train": {"tokens": model["seq_length"], "global_batch_tokens": model["seq_length"], "precision": precision},
        "optimizer": {"lr": 1e-4, "warmup_steps": 0},
        "seed": seed,
    }
    stage = stage_from_dict(tree, where)
    check_stage(stage)
    return stage


def require_new(output: Path) -> None:
    """Raises ConfigError where something is in the place of the stage already."""
    # An empty folder can be renamed over, a link cannot, wherever it points to.
    if output.is_symlink() or (output.exists() and (not output.is_dir() or any(output.iterdir()))):
        raise ConfigError(f"{output} is there already")


@contextmanager
def new_stage(output: Path) -> Iterator[RunFolder]:
    """A folder beside `output` to fill, which gets that name at the end of the block; after an error it is gone.

    What a killed conversion left of it is removed first.

    Raises:
        ConfigError: another process converts to `output` at this moment, or did in the meantime.
        OSError: it cannot be written.
    """
    temporary = output.parent / f".{output.name}.converting"
    run = RunFolder(temporary)
    with run.locked():
        try:
            for leftover in temporary.iterdir():
                if leftover.is_dir():
                    shutil.rmtree(leftover)
                elif leftover.name != ".lock":
                    leftover.unlink()
            yield run
            # Another process may have been faster.
            require_new(output)
            (temporary / ".lock").unlink()
            temporary.rename(output)
        except OSError as error:
            error.filename = error.filename or str(temporary)
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def write_checkpoint(
    run: RunFolder,
    model: ModelConfig,
    values: Iterable[tuple[Box, Tensor]],
    *,
    elements: int,
    step: int = 0,
    optimizer_steps: int = 0,
) -> None:
    """Write float32 boxes of all of a model's tensors, `elements` in all, as the stage's checkpoint.

    Raises:
        OSError: they cannot be written; where it is seen from the start that they will not fit, then.
    """
    final = run.checkpoints / f"step-{step}"
    temporary = run.checkpoints / f".tmp-{final.name}"
    files.prepare(run.checkpoints, temporary, 4 * elements)
    written = write_rank_file(temporary, 0, _telling(values, elements), threading.Event())
    state = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "model": fingerprint(model),
        "layout": {},
        "optimizer_steps": optimizer_steps,
        "scheduler": {},
        "progress": {},
    }
    files.seal(temporary, state, write_index(temporary, [written]))
    files.publish(temporary, final, keep=2)


def complete(
    run: RunFolder,
    stage: StageConfig,
    section: dict[str, Any],
    tokenizer: Path | None,
    *,
    step: int = 0,
) -> None:
    """Add what makes the folder a complete stage: configuration, `model:` section for recipes, tokenizer, marker."""
    if tokenizer is not None:
        _copy_tokenizer(tokenizer, run.path)
    run.write_config(stage)
    (run.path / MODEL_SECTION).write_text(write_yaml({"model": section}))
    run.write_marker({"steps": step, "tokens": 0, "seconds": 0.0, "checkpoint": f"checkpoints/step-{step}"})


def _copy_tokenizer(path: Path, folder: Path) -> None:
    shutil.copyfile(path, folder / path.name)
    beside = path.with_name(TOKENIZER_CONFIG)
    # A SentencePiece model says itself what ends a document.
    if path.suffix == ".json" and beside.is_file():
        shutil.copyfile(beside, folder / beside.name)


def stretches(rows: slice, *width: int) -> Iterator[slice]:
    """The rows in parts of at most `AT_ONCE` elements; `width` are the sizes of the other dimensions."""
    step = max(1, AT_ONCE // math.prod(width))
    for start in range(rows.start, rows.stop, step):
        yield slice(start, min(start + step, rows.stop))


class Telling:
    """A line of progress now and then while so many bytes are written."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._start = self._said = time.monotonic()

    def add(self, count: int) -> None:
        """So many more bytes are written."""
        self._done += count
        now = time.monotonic()
        if now - self._said >= _SAID_EVERY:
            self._said = now
            left = clock((now - self._start) * (self._total - self._done) / self._done)
            logger.info("%.2f of %.2f GB written | %s left", 1e-9 * self._done, 1e-9 * self._total, left)


def _telling(values: Iterable[tuple[Box, Tensor]], elements: int) -> Iterator[tuple[Box, Tensor]]:
    telling = Telling(4 * elements)
    for box, value in values:
        yield box, value
        telling.add(4 * box.numel)
