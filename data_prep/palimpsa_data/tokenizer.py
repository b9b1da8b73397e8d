"""SentencePiece tokenizers: training one reproducibly, and the few calls the rest needs.

Text can never turn into a control id: SentencePiece does not match control symbols in text, so `</s>` or
`<|endoftext|>` in a document are ordinary characters.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import sentencepiece

from palimpsa_data.errors import DataError
from palimpsa_data.sets import TokenizerInfo


class Tokenizer:
    """A SentencePiece `.model` file.

    `eod_id` ends every document (the model's eos); `pad_id` is the model's pad, or its unknown id where it has none
    (padding is never looked at).

    Raises:
        DataError: the file is missing, is not a SentencePiece model, or defines no eos.
    """

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
        self.pad_id = pad_id if pad_id >= 0 else self._processor.unk_id()

    @property
    def info(self) -> TokenizerInfo:
        return TokenizerInfo(self.sha256, self.vocab_size, self.eod_id, self.pad_id)

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone: nothing is added before or after, nothing in it becomes a control id."""
        return self._processor.encode(text)

    def encode_document(self, text: str) -> np.ndarray:
        """Ids of the text and the end-of-document id, [T] int32."""
        return np.array([*self.encode(text), self.eod_id], np.int32)

    def decode(self, ids: list[int]) -> str:
        """Text of the ids; control ids give nothing."""
        return self._processor.decode(ids)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """A byte-pair model over code and prose; the same texts give the same bytes.

    Bytes are the fallback, so every text can be encoded; whitespace is kept as it is, line breaks are symbols of their
    own. Ids: 0 unknown, 1 begin, 2 end (of a document), 3 padding.

    Raises:
        DataError: too little text for `vocab_size`.
    """
    lines = (line for text in texts for line in text.split("\n") if line.strip())
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            user_defined_symbols=["\n"],
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            max_sentence_length=1 << 20,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(f"cannot train a tokenizer with {vocab_size} ids: {error}") from None
    return model.getvalue()
