"""Needles in a haystack: which value belongs to a key, to several, or which values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from palimpsa_data.needles.draws import Draw

from megatron_palimpsa.evaluation.ruler.fit import Puzzle
from megatron_palimpsa.evaluation.ruler.haystack import Haystack, Units, hide, noise, places
from megatron_palimpsa.evaluation.ruler.words import distinct, key, number, uuid

_MAKE: dict[str, Callable[[Draw], str]] = {"words": key, "numbers": number, "uuids": uuid}
# The wording is the benchmark's.
_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_SEVERAL = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind} afterwards.\n{context}\nWhat are all the special magic {kind} for {query} mentioned in the provided "
    "text? The special magic {kind} for {query} mentioned in the provided text are"
)
_ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind} afterwards.\n{context}\nWhat is the special magic {kind} for {query} mentioned in the provided "
    "text? The special magic {kind} for {query} mentioned in the provided text is"
)
_PADDING_UNITS = 8


@dataclass(frozen=True)
class Retrieval:
    """The settings of one of RULER's eight tasks of this kind."""

    hay: Literal["noise", "text", "needles"]
    keys: int = 1
    values: int = 1
    """Of each key."""
    asked: int = 1
    """Keys."""
    key_kind: str = "words"
    value_kind: str = "numbers"

    def puzzle(self, draw: Draw, text: Haystack) -> Puzzle:
        """`text`: the haystack where it is a text."""
        keys = distinct(_MAKE[self.key_kind], draw, self.keys)
        values = distinct(_MAKE[self.value_kind], draw, self.keys * self.values)
        of_key = {name: values[at * self.values : (at + 1) * self.values] for at, name in enumerate(keys)}
        needles = [self._needle(name, value) for name, own in of_key.items() for value in own]
        asked = draw.shuffled(keys)[: self.asked]
        hidden, spots = draw.shuffled(needles), places(draw, len(needles))
        separator, hay = {
            "noise": ("\n", noise),
            "text": (" ", text),
            "needles": ("\n", lambda draw: self._others(draw, set(keys))),
        }[self.hay]
        units = Units(hay(Draw(draw.below(2**32))))
        answers = tuple(value for name in asked for value in of_key[name])
        template, kind = (_ONE, self.value_kind[:-1]) if len(answers) == 1 else (_SEVERAL, self.value_kind)
        query = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"

        def render(count: int, padding: str) -> str:
            context = separator.join(hide(hidden, spots, units.first(count))) + padding
            return template.format(kind=kind, context=context, query=query)

        more = separator.join(islice(hay(Draw(draw.below(2**32))), _PADDING_UNITS))
        return Puzzle(render, answers, separator + more)

    def _needle(self, name: str, value: str) -> str:
        return _NEEDLE.format(kind=self.value_kind, key=name, value=value)

    def _others(self, draw: Draw, taken: set[str]) -> Iterator[str]:
        """Needles of other keys."""
        while True:
            name = _MAKE[self.key_kind](draw)
            if name not in taken:
                yield self._needle(name, _MAKE[self.value_kind](draw))


SINGLE_1 = Retrieval("noise")
SINGLE_2 = Retrieval("text")
SINGLE_3 = Retrieval("text", value_kind="uuids")
MULTIKEY_1 = Retrieval("text", keys=4)
MULTIKEY_2 = Retrieval("needles")
MULTIKEY_3 = Retrieval("needles", key_kind="uuids", value_kind="uuids")
MULTIVALUE = Retrieval("text", values=4)
MULTIQUERY = Retrieval("text", keys=4, asked=4)
