"""Cutting a huge text where its tokenizer splits anyway, so that the pieces' ids are the ids of the whole.

Byte-pair tokenizers split a text into words before they merge anything. A place between a letter and a space is such
a split for all of them, one between a letter and punctuation or a digit for most. A candidate counts when the
tokenizer itself gives the same ids for its surroundings cut and whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np

PIECE_CHARACTERS = 1 << 20
_LONGEST_PIECE = 8 * PIECE_CHARACTERS
_WINDOW = 1 << 14
_SURROUNDINGS = 256
_CANDIDATES = 20  # of each kind and window that are tried

_PLACES = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?<=[A-Za-z])(?=[ \n][A-Za-z])",
        r"(?<=[^\W_])(?=\s)",
        r"(?<=[^\W\d_])(?=[.,;:!?()\u3002\uff0c\u3001\uff1b\uff1a\uff01\uff1f])",
        r"(?<=[^\W\d_])(?=[0-9])",
    )
)


class UncuttableError(ValueError):
    """A text too long for memory without a place to cut it."""


def pieces(text: str, encode: Callable[[str], np.ndarray]) -> Iterator[str]:
    """The text in pieces of about PIECE_CHARACTERS whose ids, end to end, are those of the text.

    Args:
        encode: the tokenizer, for short texts.

    Raises:
        UncuttableError: no place found in `_LONGEST_PIECE` characters.
    """
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        place = _place(text, start, encode)
        if place is None:
            break
        yield text[start : place[0]]
        start = place[1]
    if len(text) - start > _LONGEST_PIECE:
        raise UncuttableError(f"no place to cut in {_LONGEST_PIECE} characters")
    yield text[start:]


def _place(text: str, start: int, encode: Callable[[str], np.ndarray]) -> tuple[int, int] | None:
    """Where the piece that begins at `start` ends and the next one begins."""
    for end in range(start + PIECE_CHARACTERS, start + _LONGEST_PIECE + 1, _WINDOW):
        begin = end - _WINDOW
        window = text[begin:end]
        for kind in _PLACES:
            for match in list(kind.finditer(window, _SURROUNDINGS))[: -_CANDIDATES - 1 : -1]:
                left = begin + match.start()
                if (right := _next_start(text, left, encode)) is not None:
                    return left, right
    return None


def _next_start(text: str, cut: int, encode: Callable[[str], np.ndarray]) -> int | None:
    """Where the text goes on after a cut so that no id changes: a tokenizer that begins every text with a space wants
    the space at the cut left out."""
    before, after = text[cut - _SURROUNDINGS : cut], text[cut : cut + _SURROUNDINGS]
    whole = encode(before + after)
    for skip in (0, 1) if after.startswith(" ") else (0,):
        if np.array_equal(np.concatenate([encode(before), encode(after[skip:])]), whole):
            return cut + skip
    return None
