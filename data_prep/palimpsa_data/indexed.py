"""Megatron's indexed dataset: the .idx beside a .bin of token ids, read and written without importing torch."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from palimpsa_data.errors import DataError

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_DTYPES: dict[int, np.dtype[Any]] = {8: np.dtype(np.uint16), 4: np.dtype(np.int32)}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Index:
    """What Megatron's .idx says: dtype of the .bin, tokens of each document [D], where each starts (in bytes) [D]."""

    dtype: np.dtype[Any]
    lengths: np.ndarray
    pointers: np.ndarray

    @property
    def starts(self) -> np.ndarray:
        """Where each document starts, in tokens [D]."""
        return self.pointers // self.dtype.itemsize


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """What Megatron stores the ids of such a vocabulary in."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


def index_bytes(dtype: np.dtype[Any], lengths: np.ndarray) -> bytes:
    """Content of a .idx in which one sequence is one document.

    Args:
        lengths: tokens of each document, [D].
    """
    starts = (np.cumsum(lengths, dtype=np.int64) - lengths) * dtype.itemsize
    header = _HEADER.pack(_MAGIC, _VERSION, _CODES[dtype], len(lengths), len(lengths) + 1)
    boundaries = np.arange(len(lengths) + 1, dtype=np.int64)
    return b"".join(
        [header, lengths.astype(np.int32).tobytes(), starts.astype(np.int64).tobytes(), boundaries.tobytes()]
    )


def map_pointers(path: Path, documents: int) -> np.ndarray:
    """Where each document starts, in bytes [D], of a .idx that `read_index` has checked; memory-mapped."""
    return np.memmap(path, np.int64, mode="r", offset=_HEADER.size + 4 * documents, shape=(documents,))


def read_index(path: Path) -> Index:
    """Map a .idx into memory and check it; the arrays are views of the file.

    Raises:
        DataError: not a Megatron index, or one whose parts do not agree with each other.
    """
    try:
        content = np.memmap(path, np.uint8, mode="r")
        magic, version, code, sequences, boundaries = _HEADER.unpack_from(content)
        dtype = _DTYPES[code]
        offset = _HEADER.size
        lengths = np.frombuffer(content, np.int32, sequences, offset)
        pointers = np.frombuffer(content, np.int64, sequences, offset + 4 * sequences)
        documents = np.frombuffer(content, np.int64, boundaries, offset + 12 * sequences)
    except (OSError, struct.error, KeyError, ValueError, OverflowError) as error:
        raise DataError(f"{path}: not a readable Megatron index ({error}); prepare the data again") from None
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    whole = len(content) == offset + 12 * sequences + 8 * boundaries
    one_each = np.array_equal(documents, np.arange(sequences + 1))
    if (magic, version) != (_MAGIC, _VERSION) or not whole or not one_each:
        raise DataError(f"{path}: not a Megatron index with one sequence a document; prepare the data again")
    if not np.array_equal(pointers, starts * dtype.itemsize) or (lengths <= 0).any():
        raise DataError(f"{path}: document lengths and positions do not agree; prepare the data again")
    return Index(dtype, lengths, pointers)
