"""Token ids back to text for people's eyes, with what is not trained on marked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from palimpsa_data.errors import DataError
from palimpsa_data.sets import SetReader

if TYPE_CHECKING:
    from palimpsa_data.tokenizers import Tokenizer

LEGEND = "[[...]] is read and not trained on; <eod> ends a document"


def marked_text(tokens: np.ndarray, mask: np.ndarray | None, tokenizer: Tokenizer) -> str:
    """Ids [T] as text; stretches where mask [T] is 0 stand in double brackets, the end of a document is <eod>.

    Stretches are decoded apart, so a character whose bytes are split between two shows as its parts.
    """
    if mask is None:
        mask = np.ones(len(tokens), np.uint8)
    borders = np.flatnonzero(np.diff(mask)) + 1
    parts = []
    for part, trained in zip(np.split(tokens, borders), np.split(mask, borders), strict=True):
        text = _text(part, tokenizer)
        parts.append(text if trained.size and trained[0] else f"[[{text}]]")
    return "".join(parts)


def _text(tokens: np.ndarray, tokenizer: Tokenizer) -> str:
    ends = np.flatnonzero(tokens == tokenizer.eod_id)
    pieces = np.split(tokens, ends + 1)
    texts = [tokenizer.decode(piece[piece != tokenizer.eod_id].tolist()) for piece in pieces]
    return "<eod>".join(texts)


def dump_document(folder: Path, number: int, tokenizer: Tokenizer) -> str:
    """Document `number` of a set, decoded, under a line that says what it is.

    Raises:
        DataError: the set is damaged, has no such document, or was made with another tokenizer.
    """
    reader = SetReader(folder, checksums=False)
    if tokenizer.sha256 != reader.info.tokenizer.sha256:
        raise DataError(f"set {folder} was made with another tokenizer than {tokenizer.path}")
    if not 0 <= number < len(reader.lengths):
        raise DataError(f"set {folder} holds documents 0 to {len(reader.lengths) - 1}, no {number}")
    tokens, mask = reader.read(number, 0, int(reader.lengths[number]))
    trained = len(tokens) if mask is None else int(mask.sum())
    head = f"document {number} of {reader.info.name}: {len(tokens)} tokens, {trained} trained on; {LEGEND}"
    return f"{head}\n\n{marked_text(tokens, mask, tokenizer)}\n"
