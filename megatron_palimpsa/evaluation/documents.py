"""Documents of ids to measure models on: of a blend of prepared sets, or of files of text."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from palimpsa_data.documents import Document
from palimpsa_data.sets import SetReader
from palimpsa_data.sources import text
from palimpsa_data.sources.inputs import find_inputs
from palimpsa_data.sources.options import TextOptions
from palimpsa_data.tokenizers import Tokenizer

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.training.blend_file import read_blend

logger = logging.getLogger(__name__)

_FEWEST_TOKENS = 2


@dataclass(frozen=True)
class Text:
    """Where documents come from, and how many of them."""

    paths: tuple[str, ...] = ()
    """Files, folders or globs, as `prep text` takes them."""
    column: str = "text"
    blend: Path | None = None
    """Instead of `paths`."""
    documents: int = 256
    length: int = 4096
    """Tokens of a document; what follows them is left out."""
    stream: bool = False
    """Documents end to end in pieces of `length` tokens, each a document here."""


def read_documents(source: Text, tokenizer: Tokenizer) -> list[np.ndarray]:
    """The first `source.documents` documents of two tokens or more, each at most `source.length` long.

    Raises:
        ConfigError: there is none, or a set was made with another tokenizer.
        DataError: a file cannot be read.
    """
    skipped: Counter[str] = Counter()
    whole = _of_text(source, tokenizer, skipped) if source.blend is None else _of_blend(source.blend, tokenizer)
    cut = _pieces(whole, source.length) if source.stream else (ids[: source.length] for ids in whole)
    found: list[np.ndarray] = []
    for ids in cut:
        if len(found) == source.documents:
            break
        if len(ids) >= _FEWEST_TOKENS:
            found.append(np.array(ids, np.int32))
    reasons = ", ".join(f"{count} x {reason}" for reason, count in skipped.items())
    if not found:
        wanted = f"no piece of {source.length} tokens is there" if source.stream else "no document has 2 tokens"
        raise ConfigError(
            f"{source.blend or ', '.join(source.paths)}: {wanted}{f'; left out: {reasons}' if reasons else ''}"
        )
    if reasons:
        logger.warning("%s: left out: %s", ", ".join(source.paths), reasons)
    return found


def _pieces(documents: Iterator[np.ndarray], length: int) -> Iterator[np.ndarray]:
    """All ids end to end, in pieces of that length; what is left at the end is dropped."""
    waiting = np.zeros(0, np.int32)
    for ids in documents:
        waiting = np.concatenate([waiting, ids])
        while len(waiting) >= length:
            yield waiting[:length]
            waiting = waiting[length:]


def _of_text(source: Text, tokenizer: Tokenizer, skipped: Counter[str]) -> Iterator[np.ndarray]:
    """`skipped` counts what is no document, by reason."""
    options = TextOptions(text_column=source.column)
    for item in find_inputs(source.paths, "text"):
        for document in text.read(item, options, lambda done: None):
            if isinstance(document, Document):
                yield tokenizer.encode_document(document.text)
            else:
                skipped[document.reason] += 1


def _of_blend(path: Path, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Of all sets in turn, so that their tokens keep the proportion of the weights; to the end of the first one."""
    entries = read_blend(path, str(path))
    readers = [SetReader(entry.folder, checksums=False) for entry in entries]
    for entry, reader in zip(entries, readers, strict=True):
        if reader.info.tokenizer.sha256 != tokenizer.sha256:
            raise ConfigError(f"{path}: the set {entry.folder} was made with another tokenizer than {tokenizer.path}")
    return _in_proportion(readers, [entry.weight for entry in entries])


def _in_proportion(readers: Sequence[SetReader], weights: Sequence[float]) -> Iterator[np.ndarray]:
    taken, documents = [0] * len(readers), [0] * len(readers)
    while True:
        at = min(range(len(readers)), key=lambda number: taken[number] / weights[number])
        reader = readers[at]
        if documents[at] == len(reader.lengths):
            return
        ids, _ = reader.read(documents[at], 0, int(reader.lengths[documents[at]]))
        documents[at] += 1
        taken[at] += len(ids)
        yield ids
