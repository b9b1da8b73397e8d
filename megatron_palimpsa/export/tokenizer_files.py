"""A stage's tokenizer as files for AutoTokenizer, which then gives the ids of training for every text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from palimpsa_data import tokenizers
from palimpsa_data.tokenizers import Tokenizer
from palimpsa_data.tokenizers.json_file import GigatokenTokenizer, HuggingFaceTokenizer
from palimpsa_data.tokenizers.probes import PROBES

from megatron_palimpsa.config import ConfigError

_ORIGINAL = "training_tokenizer"
"""Stem of the file that the shards were made with, untouched: its checksum says whether text was made with it."""
_LONGEST = 10**30
"""Transformers' word for no limit."""


def load_tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    """A stage's tokenizer.

    Raises:
        ConfigError: it has ids that the model does not know.
        DataError: it cannot be read.
    """
    tokenizer = tokenizers.load(path, backend="huggingface")
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"{path}: a tokenizer of {tokenizer.vocab_size} ids, the model knows {vocab_size} of them: "
            f"it was trained with another one"
        )
    return tokenizer


def original(folder: Path) -> Path | None:
    """The tokenizer that an exported model was trained with; None where there is none."""
    return next((path for path in sorted(folder.glob(f"{_ORIGINAL}.*"))), None)


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """What ends a document, and what fills rows up: the end again where the tokenizer has no padding of its own."""
    pad = tokenizer.eod_id if tokenizer.pad_id is None else tokenizer.pad_id
    return {"eos_token_id": tokenizer.eod_id, "pad_token_id": pad}


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the file itself.

    As in training, nothing is added to a text, and what looks like a special token in it is text. Rows are padded on
    the left.

    Raises:
        ConfigError: transformers would give other ids for some text.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    backend = _backend(tokenizer)
    names = {role: backend.id_to_token(number) for role, number in special_ids(tokenizer).items()}
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=names["eos_token_id"],
        pad_token=names["pad_token_id"],
        padding_side="left",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_max_length=_LONGEST,
    ).save_pretrained(folder)
    shutil.copyfile(tokenizer.path, folder / f"{_ORIGINAL}{tokenizer.path.suffix}")
    saved = AutoTokenizer.from_pretrained(folder)
    for text in PROBES:
        if not np.array_equal(saved(text)["input_ids"], tokenizer.encode(text)):
            raise ConfigError(f"{tokenizer.path}: transformers gives other ids with it, for {text!r} among others")


def _backend(tokenizer: Tokenizer) -> Any:
    """The tokenizer in Hugging Face's tokenizers."""
    from tokenizers import Tokenizer as Backend

    if isinstance(tokenizer, GigatokenTokenizer):
        tokenizer = tokenizer.reference
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return Backend.from_str(json.dumps(tokenizer.settings))
    from transformers.convert_slow_tokenizer import SentencePieceExtractor, SpmConverter

    proto = SentencePieceExtractor(str(tokenizer.path)).proto
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    is_unigram = proto.trainer_spec.model_type == 1
    vocabulary = pieces if is_unigram else {piece: number for number, (piece, _) in enumerate(pieces)}
    return SpmConverter.build_tokenizer_from_spm_proto(proto, vocabulary, legacy=False)
