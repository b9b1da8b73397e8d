"""Byte-pair `tokenizer.json` files (GPT-NeoX type), encoded by gigatoken or by Hugging Face `tokenizers`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from palimpsa_data.errors import DataError
from palimpsa_data.optional import optional_packages
from palimpsa_data.tokenizers.base import Batch, Tokenizer
from palimpsa_data.tokenizers.probes import PROBES

TOKENIZER_CONFIG = "tokenizer_config.json"
"""Beside the file: its eos_token and pad_token come first."""
_END_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eos|>")
_PAD_TOKENS = ("<|padding|>", "<pad>", "<|pad|>", "[PAD]")
_SLICE_CHARACTERS = 1 << 16  # encodings take some 100 bytes a token until their ids are taken out: a cache's worth


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json` encoded by Hugging Face `tokenizers`, in this thread alone.

    `eod_id` is the eos of the tokenizer_config.json beside the file or the first of the customary end tokens that the
    file defines; `pad_id` likewise.

    Raises:
        DataError: the file is missing, is not a tokenizer.json, or defines no token that could end documents.
    """

    kind = "tokenizer.json"
    backend = "huggingface"

    def __init__(self, path: Path) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a job runs one process a core
        with optional_packages():
            from tokenizers import Tokenizer as Encoder

        try:
            content = path.read_bytes()
            self.settings = _plain_settings(json.loads(content))
            self._encoder = Encoder.from_str(json.dumps(self.settings))
            vocabulary = self._encoder.get_vocab(with_added_tokens=True)
            end, pad = _control_tokens(path, vocabulary)
            if _called_special(self.settings, (end, pad)):
                self._encoder = Encoder.from_str(json.dumps(self.settings))
        except Exception as error:  # `tokenizers` raises nothing more special
            raise DataError(f"cannot read the tokenizer {path}: {error}") from None
        if end is None:
            special = [token["content"] for token in self.settings["added_tokens"] if token["special"]]
            raise DataError(
                f"{path}: none of its special tokens {special} is known to end a document; "
                f"name it as eos_token in a tokenizer_config.json beside the file"
            )
        self._encoder.encode_special_tokens = True
        self.path = path
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.vocab_size = max(vocabulary.values()) + 1
        self.eod_id = vocabulary[end]
        self.pad_id = None if pad is None else vocabulary[pad]

    def _encode(self, texts: Sequence[str]) -> Batch:
        for text in texts:
            text.isascii() or text.encode()
        ids, lengths = [], [0]
        for part in _slices(texts):
            encodings = [encoding.ids for encoding in self._encoder.encode_batch_fast(part, add_special_tokens=False)]
            lengths.extend(map(len, encodings))
            ids.append(np.fromiter(chain.from_iterable(encodings), np.int32, sum(lengths[-len(part) :])))
        return Batch(np.concatenate(ids) if ids else np.zeros(0, np.int32), np.cumsum(lengths, dtype=np.int64))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._encoder.decode([int(i) for i in ids], skip_special_tokens=True)


class GigatokenTokenizer(Tokenizer):
    """The same file encoded by gigatoken; `reference` is the Hugging Face tokenizer that its ids must equal.

    Raises:
        DataError: gigatoken is not installed, cannot read the file, or gives other ids for the probe strings.
    """

    kind = "tokenizer.json"
    backend = "gigatoken"

    def __init__(self, reference: HuggingFaceTokenizer) -> None:
        try:
            # gigatoken imports it at its first batch, and gives lists without a word where that fails or Ctrl-C comes.
            import awkward  # noqa: F401
            import gigatoken
        except ImportError as error:
            raise DataError(
                f"{error.name} is not installed (.venv/bin/pip install -e '.[data]' -c constraints.txt)"
            ) from None
        settings = dict(reference.settings)
        settings["added_tokens"] = [token for token in settings["added_tokens"] if not token["special"]]
        try:
            self._encoder = gigatoken.Tokenizer.from_json(json.dumps(settings))
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise DataError(f"gigatoken cannot encode with {reference.path}: {reason}") from None
        self.reference = reference
        self.path, self.sha256, self.vocab_size = reference.path, reference.sha256, reference.vocab_size
        self.eod_id, self.pad_id = reference.eod_id, reference.pad_id
        different = [text for text in PROBES if not np.array_equal(self.encode(text), reference.encode(text))]
        if different:
            raise DataError(
                f"gigatoken and Hugging Face give different ids with {self.path}, for {different[0]!r} among others"
            )

    def _encode(self, texts: Sequence[str]) -> Batch:
        try:
            layout = self._encoder.encode_batch(list(texts), parallel=False).layout
        except TypeError:
            for text in texts:
                text.encode()
            raise
        return Batch(np.asarray(layout.content.data), np.asarray(layout.offsets.data))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.reference.decode(ids)


def _plain_settings(settings: Any) -> dict[str, Any]:
    """The file's settings without what would add, drop or randomise ids: truncation, padding, templates, dropout."""
    if not isinstance(settings, dict) or not isinstance(settings.get("model"), dict):
        raise ValueError("not a tokenizer.json of Hugging Face's tokenizers")
    model = {**settings["model"], "dropout": None}
    added = settings.get("added_tokens") or []
    return {
        **settings,
        "model": model,
        "added_tokens": added,
        "truncation": None,
        "padding": None,
        "post_processor": None,
    }


def _control_tokens(path: Path, vocabulary: dict[str, int]) -> tuple[str | None, str | None]:
    """The token that ends documents and the one that pads: those of the tokenizer_config.json beside the file first."""
    config = path.with_name(TOKENIZER_CONFIG)
    settings = json.loads(config.read_bytes()) if config.is_file() else {}
    named = [settings.get(role) for role in ("eos_token", "pad_token")]
    end, pad = (token["content"] if isinstance(token, dict) else token for token in named)
    end = next((token for token in (end, *_END_TOKENS) if token in vocabulary), None)
    return end, next((token for token in (pad, *_PAD_TOKENS) if token in vocabulary and token != end), None)


def _called_special(settings: dict[str, Any], tokens: Sequence[str | None]) -> bool:
    """Make the tokens special, so that they are not matched in text; whether the file did not call them so."""
    ordinary = [token for token in settings["added_tokens"] if token["content"] in tokens and not token["special"]]
    for token in ordinary:
        token["special"] = True
    return bool(ordinary)


def _slices(texts: Sequence[str]) -> list[list[str]]:
    """The texts in lists of about `_SLICE_CHARACTERS`."""
    found: list[list[str]] = []
    room = 0
    for text in texts:
        if room < len(text) or not found:
            found.append([])
            room = _SLICE_CHARACTERS
        found[-1].append(text)
        room -= len(text)
    return found
