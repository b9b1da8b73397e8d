"""From documents and examples to one shard: batches through the tokenizer, ids of a sample compared, shard written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from palimpsa_data.documents import Document, Example, Item, Skipped
from palimpsa_data.errors import DataError
from palimpsa_data.indexed import token_dtype
from palimpsa_data.instruct import encode_example
from palimpsa_data.shards import Encoded, EncodedBatch, Manifest, ShardSpec, write_shard
from palimpsa_data.tokenizers import Tokenizer, UncuttableError
from palimpsa_data.tokenizers.agreement import Agreement

_BATCH_CHARACTERS = 1 << 21
_BATCH_DOCUMENTS = 1 << 14


@dataclass(frozen=True)
class Limits:
    """Tokens of a document, its end included, below or above which it is left out; the most tokens of an example.

    Raises:
        DataError: a limit that would leave everything out, or that is none.
    """

    min_tokens: int = 1
    max_tokens: int | None = None
    max_example_tokens: int = 32768

    def __post_init__(self) -> None:
        if self.min_tokens < 1:
            raise DataError(f"--min-tokens must be at least 1, not {self.min_tokens}")
        # A token and the document's end.
        if self.max_tokens is not None and self.max_tokens < max(self.min_tokens, 2):
            raise DataError(f"--max-tokens {self.max_tokens} is below --min-tokens {self.min_tokens}, or 2")
        if self.max_example_tokens < 2:
            raise DataError(f"--max-example-tokens must be at least 2, not {self.max_example_tokens}")


@dataclass(frozen=True)
class Done:
    """What one batch added to a shard."""

    documents: int
    tokens: int
    text_bytes: int


def write_input(
    items: Iterable[Item],
    tokenizer: Tokenizer,
    spec: ShardSpec,
    stem: Path,
    *,
    limits: Limits,
    progress: Callable[[Done], None],
    wait: bool = True,
) -> tuple[Manifest, bool]:
    """Encode the items and write them as one shard, unless that is there; -> its manifest and whether it was written.

    Raises:
        BusyError: another process writes the shard and `wait` is false.
        DataError: the disk is full, or gigatoken's ids differ from Hugging Face's; the shard stays unfinished.
    """
    parts = _reported(_Encoding(tokenizer, limits).run(items), progress)
    return write_shard(stem, parts, spec, wait=wait)


def _reported(
    parts: Iterable[Encoded | EncodedBatch | Skipped], progress: Callable[[Done], None]
) -> Iterator[Encoded | EncodedBatch | Skipped]:
    for part in parts:
        yield part
        if isinstance(part, EncodedBatch):
            progress(Done(len(part.lengths), part.tokens.size, part.text_bytes))
        elif isinstance(part, Encoded):
            progress(Done(1, part.tokens.size, part.text_bytes))


@dataclass
class _Encoding:
    """Items to token ids; documents in batches, so they may come after examples and skipped ones that followed them."""

    tokenizer: Tokenizer
    limits: Limits
    _texts: list[str] = field(default_factory=list)
    _sources: list[str] = field(default_factory=list)
    _characters: int = 0
    _text_bytes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._dtype = token_dtype(self.tokenizer.vocab_size)
        self._agreement = Agreement(self.tokenizer)

    def run(self, items: Iterable[Item]) -> Iterator[Encoded | EncodedBatch | Skipped]:
        for item in items:
            if isinstance(item, Skipped):
                yield item
                continue
            size = _utf8_bytes(item)
            if size is None:
                yield Skipped("not Unicode: half of a surrogate pair", damaged=True)
            elif isinstance(item, Example):
                yield from self._example(item, size)
            else:
                self._add(item, size)
                if self._characters >= _BATCH_CHARACTERS or len(self._texts) >= _BATCH_DOCUMENTS:
                    yield from self._flush()
        yield from self._flush()

    def _example(self, example: Example, size: int) -> Iterator[Encoded | Skipped]:
        try:
            encoded = encode_example(example, self.tokenizer, self.limits.max_example_tokens)
        except UncuttableError as error:
            yield Skipped(str(error))
            return
        if isinstance(encoded, Encoded):
            encoded = Encoded(encoded.tokens, encoded.mask, example.source, size)
        yield encoded

    def _add(self, document: Document, size: int) -> None:
        self._texts.append(document.text)
        self._sources.append(document.source)
        self._text_bytes.append(size)
        self._characters += len(document.text)

    def _flush(self) -> Iterator[EncodedBatch | Skipped]:
        texts, sources, sizes = self._texts, self._sources, self._text_bytes
        self._texts, self._sources, self._text_bytes, self._characters = [], [], [], 0
        if not texts:
            return
        try:
            ids, offsets = self.tokenizer.encode_flat(texts)
        except UncuttableError as error:
            if len(texts) == 1:
                yield Skipped(str(error))
                return
            for text, source, size in zip(texts, sources, sizes, strict=True):
                self._add(Document(text, source), size)
                yield from self._flush()
            return
        self._agreement.check(texts, ids, offsets)
        lengths = np.diff(offsets) + 1
        kept = self._within_limits(lengths)
        yield from self._too_short_or_long(lengths[~kept])
        chosen = np.flatnonzero(kept).tolist()
        yield EncodedBatch(
            self._with_ends(ids, offsets, chosen),
            lengths[kept],
            [sources[i] for i in chosen],
            sum(sizes[i] for i in chosen),
        )

    def _within_limits(self, lengths: np.ndarray) -> np.ndarray:
        most = np.iinfo(np.int32).max if self.limits.max_tokens is None else self.limits.max_tokens
        # A text without a token (an empty one) is its end alone.
        return (lengths > 1) & (lengths >= self.limits.min_tokens) & (lengths <= most)

    def _too_short_or_long(self, lengths: np.ndarray) -> Iterator[Skipped]:
        for length in lengths.tolist():
            if length == 1:
                yield Skipped("empty")
            elif length < self.limits.min_tokens:
                yield Skipped(f"fewer than {self.limits.min_tokens} tokens")
            else:
                yield Skipped(f"more than {self.limits.max_tokens} tokens")

    def _with_ends(self, ids: np.ndarray, offsets: np.ndarray, chosen: list[int]) -> np.ndarray:
        """The chosen documents end to end, each with its end-of-document id, in the type they are stored in."""
        if ids.size and int(ids.max()) >= self.tokenizer.vocab_size:
            raise DataError(
                f"the tokenizer gave the id {int(ids.max())}, its vocabulary has {self.tokenizer.vocab_size}"
            )
        bounds = offsets.tolist()
        tokens = np.empty(sum(bounds[i + 1] - bounds[i] + 1 for i in chosen), self._dtype)
        end = 0
        for i in chosen:
            start, end = end, end + bounds[i + 1] - bounds[i] + 1
            tokens[start : end - 1] = ids[bounds[i] : bounds[i + 1]]
            tokens[end - 1] = self.tokenizer.eod_id
        return tokens


def _utf8_bytes(item: Document | Example) -> int | None:
    """Size of the item's text in UTF-8; None where it is not text."""
    text = item.text if isinstance(item, Document) else item.prompt + item.answer
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return None
