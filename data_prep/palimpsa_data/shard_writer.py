"""Writing one shard's files under temporary names, and counting what goes into its manifest."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from palimpsa_data.documents import Skipped
from palimpsa_data.errors import DataError
from palimpsa_data.files import fsync
from palimpsa_data.indexed import index_bytes, token_dtype
from palimpsa_data.lengths import histogram


@dataclass(frozen=True)
class Encoded:
    """A document as token ids [T], its end-of-document id included, and which of them are trained on (None: all)."""

    tokens: np.ndarray
    mask: np.ndarray | None = None
    source: str = ""
    text_bytes: int = 0


@dataclass(frozen=True)
class EncodedBatch:
    """Documents end to end, all their tokens trained on: ids [N], tokens of each [D], source of each [D]."""

    tokens: np.ndarray
    lengths: np.ndarray
    sources: Sequence[str]
    text_bytes: int


class FileRecord(TypedDict):
    """What a manifest says of a file."""

    bytes: int
    sha256: str


@dataclass
class Counts:
    """The sums and extremes of a manifest."""

    documents: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    text_bytes: int = 0
    shortest: int = 0
    longest: int = 0
    max_id: int = -1
    damaged: int = 0


class ShardWriter:
    """Streams documents into `tokens` (.bin), `index` (.idx) and, with a loss mask, `mask` (.mask.bin).

    Args:
        paths: the files to write, in that order; the third decides whether there is a loss mask.
        name: of the shard, for messages.
    """

    def __init__(self, paths: Sequence[Path], vocab_size: int, name: str) -> None:
        self.dtype = token_dtype(vocab_size)
        self.counts = Counts()
        self.lengths: Counter[int] = Counter()
        self.skipped: Counter[str] = Counter()
        self.sources: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        self._vocab_size, self._name, self._index_path = vocab_size, name, paths[1]
        self._all_lengths: list[np.ndarray] = []
        self._tokens = _HashedFile(paths[0])
        self._mask = _HashedFile(paths[2]) if len(paths) > 2 else None

    def add(self, item: Encoded | EncodedBatch | Skipped) -> None:
        """Raises DataError for an id outside the vocabulary or a mask of another length than its document."""
        if isinstance(item, Skipped):
            self._skip(item)
        elif item.tokens.size == 0:
            if isinstance(item, Encoded):
                self._skip(Skipped("empty"))
        elif isinstance(item, Encoded):
            lengths = np.array([item.tokens.size])
            self._write(item.tokens, lengths, [item.source], item.text_bytes, _checked_mask(item))
        else:
            self._write(item.tokens, item.lengths, item.sources, item.text_bytes, None)

    def finish(self) -> list[FileRecord]:
        """Flush everything to the disk; -> bytes and sha256 of each file."""
        lengths = np.concatenate([np.zeros(0, np.int64), *self._all_lengths])
        index = _HashedFile(self._index_path)
        index.write(index_bytes(self.dtype, lengths))
        self.counts.shortest = int(lengths.min(initial=self.counts.longest))
        files = [self._tokens, index, *([self._mask] if self._mask else [])]
        return [file.finish() for file in files]

    def close(self) -> None:
        for file in (self._tokens, self._mask):
            if file is not None:
                file.close()

    def _skip(self, item: Skipped) -> None:
        self.skipped[item.reason] += 1
        self.counts.damaged += item.damaged

    def _write(
        self, tokens: np.ndarray, lengths: np.ndarray, sources: Sequence[str], text_bytes: int, mask: np.ndarray | None
    ) -> None:
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self._vocab_size:
            raise DataError(f"shard {self._name}: token id {min(low, 0) or high} is outside 0..{self._vocab_size - 1}")
        self._tokens.write(np.ascontiguousarray(tokens, self.dtype))
        counts = self.counts
        counts.trained_tokens += tokens.size if mask is None else int(mask.sum())
        if self._mask is not None:
            self._mask.write(np.ones(tokens.size, np.uint8) if mask is None else mask)
        counts.documents += len(lengths)
        counts.tokens += tokens.size
        counts.text_bytes += text_bytes
        counts.longest = max(counts.longest, int(lengths.max()))
        counts.max_id = max(counts.max_id, high)
        self.lengths.update(histogram(lengths))
        self._all_lengths.append(lengths.astype(np.int32))
        for source, length in zip(sources, lengths.tolist(), strict=True):
            entry = self.sources[source]
            entry[0] += 1
            entry[1] += length


def _checked_mask(item: Encoded) -> np.ndarray | None:
    if item.mask is not None and item.mask.size != item.tokens.size:
        raise DataError(f"a loss mask has {item.mask.size} entries for {item.tokens.size} tokens")
    return None if item.mask is None else item.mask.astype(np.uint8)


class _HashedFile:
    """A file that knows the sha256 of what went into it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self._bytes = 0

    def write(self, content: Any) -> None:
        view = memoryview(content).cast("B")
        self._file.write(view)
        self._digest.update(view)
        self._bytes += len(view)

    def finish(self) -> FileRecord:
        self.close()
        fsync(self._path)
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}

    def close(self) -> None:
        self._file.close()
