"""Comparing gigatoken's ids with Hugging Face's while a shard is written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from palimpsa_data.errors import DataError
from palimpsa_data.tokenizers.base import Tokenizer
from palimpsa_data.tokenizers.json_file import GigatokenTokenizer

_PER_BATCH = 4
_CHARACTERS = 1 << 13  # of a longer text only the beginning is compared


class Agreement:
    """Compares some documents of batches 1, 2, 4, 8, ... of a shard: the more, the longer it is, at little cost.

    For a tokenizer other than gigatoken's it does nothing.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer if isinstance(tokenizer, GigatokenTokenizer) else None
        self._batches = 0
        self.compared = 0

    def check(self, texts: Sequence[str], ids: np.ndarray, offsets: np.ndarray) -> None:
        """Compare a few of the texts with what they were encoded to.

        Raises:
            DataError: the two differ.
        """
        self._batches += 1
        if self._tokenizer is None or self._batches & (self._batches - 1):
            return
        for place in sorted({len(texts) * number // _PER_BATCH for number in range(_PER_BATCH)}):
            found = ids[offsets[place] : offsets[place + 1]]
            self._compare(self._tokenizer, texts[place], found)

    def _compare(self, tokenizer: GigatokenTokenizer, text: str, found: np.ndarray) -> None:
        if len(text) > _CHARACTERS:
            text = text[:_CHARACTERS]
            found = tokenizer.encode(text)
        expected = tokenizer.reference.encode(text)
        self.compared += 1
        if not np.array_equal(found, expected):
            size = min(len(found), len(expected))
            place = int(np.argmin(np.append(found[:size] == expected[:size], False)))
            raise DataError(
                f"gigatoken gives other ids than Hugging Face from token {place} on in a document that begins with "
                f"{text[:40]!r}; prepare with --backend huggingface"
            )
