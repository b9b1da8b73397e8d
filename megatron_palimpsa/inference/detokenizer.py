"""Text of ids as they come, without cutting a character that several ids make together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from palimpsa_data.tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
_LONGEST_CONTEXT = 8
_MOST_WAITING = 16


class Detokenizer:
    """Gives the text of ids piece by piece; the pieces together are the text of all ids.

    What an id looks like depends on those before it (spaces at the beginning, bytes of one character). So each piece is
    the difference that the new ids make behind a few that are known; characters that may not be whole wait, decoded as
    U+FFFD until they are.

    Args:
        before: ids that the text follows, such as a prompt's.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] | np.ndarray = ()) -> None:
        self._decode = tokenizer.decode
        self._context: list[int] = self._whole_end(before)
        self._waiting: list[int] = []
        self._given = len(self._decode(self._context))
        """Characters of the context and what waits that need not be given out any more."""

    def add(self, token: int) -> str:
        """The text that is certain with one more id; often of this id alone, sometimes none."""
        self._waiting.append(token)
        text = self._decode(self._context + self._waiting)
        certain = text.rstrip(_REPLACEMENT)
        full = len(self._waiting) >= _MOST_WAITING
        if full:
            # So many bytes are no text. Only the last three may still become a character.
            certain = text[: max(len(certain), len(text) - 3)]
        piece = self._take(certain)
        if full or certain == text:
            self._forget(len(text) - self._given)
        return piece

    def rest(self) -> str:
        """What still waits, at the end."""
        return self._take(self._decode(self._context + self._waiting))

    def _take(self, text: str) -> str:
        piece = text[self._given :]
        self._given += len(piece)
        return piece

    def _forget(self, still_to_give: int) -> None:
        """Let the ids that waited be the context, unless they alone are no text that others could follow."""
        if self._decode(self._waiting):
            self._context = self._waiting
        self._given = len(self._decode(self._context)) - still_to_give
        self._waiting = []

    def _whole_end(self, ids: Sequence[int] | np.ndarray) -> list[int]:
        """The fewest last ids that are text by themselves."""
        for count in range(1, min(len(ids), _LONGEST_CONTEXT) + 1):
            end = [int(token) for token in ids[-count:]]
            text = self._decode(end)
            if text and _REPLACEMENT not in text:
                return end
        return []
