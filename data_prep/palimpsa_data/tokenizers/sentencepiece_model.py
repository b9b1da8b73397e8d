"""SentencePiece `.model` files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import sentencepiece

from palimpsa_data.errors import DataError
from palimpsa_data.tokenizers.base import Batch, Tokenizer


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece `.model`; `eod_id` is its eos, `pad_id` its pad.

    Raises:
        DataError: the file is missing, is not a SentencePiece model, or defines no eos.
    """

    kind = backend = "sentencepiece"

    def __init__(self, path: Path) -> None:
        try:
            content = path.read_bytes()
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except (OSError, RuntimeError) as error:
            raise DataError(f"cannot read the tokenizer {path}: {error}") from None
        self.path = path
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.vocab_size = self._processor.vocab_size()
        self.eod_id = self._processor.eos_id()
        if self.eod_id < 0:
            raise DataError(f"{path}: the model defines no end-of-sentence id, which ends documents here")
        pad_id = self._processor.pad_id()
        self.pad_id = pad_id if pad_id >= 0 and pad_id != self.eod_id else None

    def _encode(self, texts: Sequence[str]) -> Batch:
        for text in texts:
            text.isascii() or text.encode()  # the library would put other characters for what is none
        ids = self._processor.encode(list(texts), num_threads=1)
        offsets = np.cumsum([0, *map(len, ids)], dtype=np.int64)
        return Batch(np.fromiter(chain.from_iterable(ids), np.int32, int(offsets[-1])), offsets)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._processor.decode([int(i) for i in ids])
