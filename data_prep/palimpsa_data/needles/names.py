"""Invented words for keys and variables, and values for them.

Every word belongs to training or to evaluation, by its spelling alone, so that the two never share a key whatever their
seeds are.
"""

from __future__ import annotations

import zlib
from typing import Literal

from palimpsa_data.needles.draws import Draw

_ONSETS = (
    "b", "br", "d", "dr", "f", "fl", "g", "gl", "h", "j", "k", "kr", "l", "m", "n", "p", "pl", "r", "s", "sk", "st",
    "t", "tr", "v", "w", "z",
)  # fmt: skip
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "io", "ou")
_CODAS = ("", "", "", "l", "n", "r", "s", "k", "m", "nd", "rt", "x")
_CODE_LETTERS = "BCDFGHJKLMNPQRSTVWXZ"


def split_of(word: str) -> Literal["train", "evaluation"]:
    """Which side an invented word is on: half of them each."""
    return "evaluation" if zlib.crc32(word.encode()) & 1 else "train"


def word(draw: Draw, split: Literal["train", "evaluation"] = "train") -> str:
    """An invented word of one half, of two or three syllables."""
    while True:
        syllables = draw.between(2, 3)
        spelled = "".join(draw.choice(_ONSETS) + draw.choice(_VOWELS) + draw.choice(_CODAS) for _ in range(syllables))
        if split_of(spelled) == split:
            return spelled


def words(draw: Draw, count: int) -> list[str]:
    """Distinct invented words."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[word(draw)] = None
    return list(found)


def value(draw: Draw) -> str:
    """A number of 5, 6 or 8 digits or a code such as KT-4071-W; RULER's are 7 digits, English words or UUIDs."""
    if draw.below(3):
        digits = draw.choice((5, 6, 8))
        return str(draw.between(10 ** (digits - 1), 10**digits - 1))
    letters = [draw.choice(_CODE_LETTERS) for _ in range(3)]
    return f"{letters[0]}{letters[1]}-{draw.between(1000, 9999)}-{letters[2]}"


def values(draw: Draw, count: int) -> list[str]:
    """Distinct values, none inside another."""
    found: list[str] = []
    while len(found) < count:
        made = value(draw)
        if not any(made in other or other in made for other in found):
            found.append(made)
    return found
