"""What every tokenizer here can do."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from palimpsa_data.sets import TokenizerInfo
from palimpsa_data.tokenizers.pieces import PIECE_CHARACTERS, pieces


class Batch(NamedTuple):
    """Ids of several texts [D], end to end; text i is `ids[offsets[i] : offsets[i + 1]]`, offsets [D + 1] int64."""

    ids: np.ndarray
    offsets: np.ndarray


class Tokenizer(ABC):
    """Text to ids and back; see `load` for how one is made.

    `eod_id` ends every document; `pad_id` is the file's own padding id, which is never `eod_id`, or None.
    """

    path: Path
    sha256: str
    kind: str
    """`sentencepiece` or `tokenizer.json`."""
    backend: str
    """What encodes: `sentencepiece`, `gigatoken` or `huggingface`."""
    note: str = ""
    """Why the backend is not the fastest one, in a line; empty where there is nothing to say."""
    vocab_size: int
    eod_id: int
    pad_id: int | None

    @property
    def info(self) -> TokenizerInfo:
        # Padding is never looked at, but it is an id that the model has and that ends no document.
        pad_id = self.pad_id if self.pad_id is not None else int(self.eod_id == 0)
        return TokenizerInfo(self.sha256, self.vocab_size, self.eod_id, pad_id)

    def encode(self, text: str) -> np.ndarray:
        """Ids of the text alone [T] int32: nothing is added before or after, nothing in it becomes a control id."""
        return self.encode_flat([text]).ids.astype(np.int32, copy=False)

    def encode_document(self, text: str) -> np.ndarray:
        """Ids of the text and the end-of-document id, [T] int32."""
        return np.append(self.encode(text), np.int32(self.eod_id))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text."""
        ids, offsets = self.encode_flat(texts)
        ids = ids.astype(np.int32, copy=False)
        return [ids[start:stop] for start, stop in itertools.pairwise(offsets.tolist())]

    def encode_flat(self, texts: Sequence[str]) -> Batch:
        """Ids of the texts end to end, of any integer dtype.

        A text longer than `PIECE_CHARACTERS` goes through in pieces; the ids are those of the whole.

        Raises:
            UncuttableError: a text has no place to be cut for so long that it may not fit into memory.
            UnicodeEncodeError: a text holds half of a surrogate pair, which is no character.
        """
        if all(len(text) <= PIECE_CHARACTERS for text in texts):
            return self._encode(texts)
        ids: list[np.ndarray] = []
        offsets = [0]
        for text in texts:
            ids.extend(_narrow(self._encode_one(piece)) for piece in pieces(text, self._encode_one))
            offsets.append(sum(map(len, ids)))
        return Batch(np.concatenate(ids), np.array(offsets))

    def _encode_one(self, text: str) -> np.ndarray:
        return self._encode([text]).ids

    @abstractmethod
    def _encode(self, texts: Sequence[str]) -> Batch: ...

    @abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of the ids; control ids give nothing."""


def _narrow(ids: np.ndarray) -> np.ndarray:
    # A huge document's ids are the most that a process ever holds.
    return ids.astype(np.uint16) if ids.max(initial=0) < 1 << 16 else ids
