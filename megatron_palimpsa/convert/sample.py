"""Sample text for looking at a model: rows of tokens of a plain text file, or of prepared sets."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from palimpsa_data.tokenizers import Tokenizer

from megatron_palimpsa.config import ConfigError, DataConfig, StageConfig
from megatron_palimpsa.inference.opened import Opened
from megatron_palimpsa.training.batch import Batch
from megatron_palimpsa.training.data import StageData

_CHARACTERS_AT_ONCE = 2**20


@dataclass(frozen=True)
class Sample:
    """The text to measure on."""

    path: Path
    """A UTF-8 text file, or a blend of prepared sets."""
    is_blend: bool
    tokens: int
    """At most so many, in whole rows."""
    seq_length: int
    """Tokens of a row, which starts without memory."""


def sample_rows(it: Opened, sample: Sample) -> list[Batch]:
    """The rows to run a model on: `tokens // seq_length` of them, or what the text has.

    Raises:
        ConfigError: no tokenizer is named; the text or the blend cannot be read, fills no row, or does not fit the
            tokenizer and the model.
    """
    config, rows = it.config, sample.tokens // sample.seq_length
    if it.tokenizer is None:
        raise ConfigError(f"{it.checkpoint}: its stage names no tokenizer; give --tokenizer FILE, the model's own")
    if sample.is_blend:
        return _blend_rows(sample.path, it.tokenizer.path, config, sample.seq_length, rows)
    return _text_rows(sample.path, it.tokenizer, config.model.vocab_size, sample.seq_length, rows)


def _text_rows(path: Path, tokenizer: Tokenizer, vocab_size: int, seq_length: int, rows: int) -> list[Batch]:
    """Each row is a document of its own."""
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"{tokenizer.path}: has {tokenizer.vocab_size} ids, the model knows {vocab_size}; name its own tokenizer"
        )
    parts: list[np.ndarray] = []
    found = 0
    try:
        with path.open(encoding="utf-8") as file:
            while found < rows * seq_length and (text := file.read(_CHARACTERS_AT_ONCE)):
                parts.append(tokenizer.encode(text))
                found += len(parts[-1])
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    rows = min(rows, found // seq_length)
    if not rows:
        raise ConfigError(f"{path}: {found} tokens are too few, a row has {seq_length}: give more text or shorter rows")
    tokens = np.concatenate(parts)[: rows * seq_length].astype(np.int64).reshape(rows, seq_length)
    return [_document(torch.from_numpy(row)) for row in tokens]


def _document(tokens: torch.Tensor) -> Batch:
    row = tokens[None]
    offsets = torch.tensor([0, len(tokens)], dtype=torch.int32)
    return Batch(row, row.roll(-1, dims=1), torch.zeros(row.shape), offsets)


def _blend_rows(blend: Path, tokenizer: Path, config: StageConfig, seq_length: int, rows: int) -> list[Batch]:
    """The blend's first packed sequences."""
    stage = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, seq_length=seq_length),
        data=DataConfig(train_blend=str(blend), valid_blend=str(blend), tokenizer=str(tokenizer)),
        train=dataclasses.replace(
            config.train, tokens=seq_length, global_batch_tokens=seq_length, micro_batch_size=1, eval_batches=rows
        ),
    )
    found = StageData(stage).valid_batches()
    if not found:
        raise ConfigError(f"{blend}: its sets are too short for a row of {seq_length} tokens: give shorter rows")
    return found
