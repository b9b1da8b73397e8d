"""What needles are hidden in: RULER's repeated noise, sentences made here, or a text of the user's."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence

from palimpsa_data.needles.draws import Draw

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

Haystack = Callable[[Draw], Iterator[str]]
"""Endless sentences."""

_SUBJECTS = (
    "the morning train", "a narrow path", "the committee", "this year's exhibition", "the lower valley", "an engineer",
    "the oldest bridge in the county", "most of the audience", "the second edition", "a spell of dry weather",
    "the research station", "every visitor", "the northern coast", "a small publisher", "the orchestra", "her report",
    "the town council", "an early map", "the winter timetable", "the workshop on the corner", "a former colleague",
    "the museum's collection", "the river", "their neighbour's garden", "the final chapter",
)  # fmt: skip
_VERBS = (
    "leads past", "depends on", "was compared with", "owes much to", "says little about", "is older than",
    "was planned together with", "drew attention to", "had been mistaken for", "outlasted", "changed the look of",
    "is described at length beside", "left no trace in", "was named after", "borrowed freely from",
    "could not replace", "was restored at the same time as", "rarely mentions",
)  # fmt: skip
_OBJECTS = (
    "the market square", "a forgotten harbour", "the mountain road", "several earlier proposals", "the new library",
    "a collection of letters", "the local dialect", "the price of timber", "an unusual experiment", "the spring flood",
    "a series of public lectures", "the railway company", "the eastern gate", "the custom of evening walks",
    "a handful of volunteers", "the glass factory", "an unfinished novel", "the botanical garden", "the school archive",
    "a theory of colour", "the lighthouse keeper's diary", "the town's first newspaper", "a quarrel among historians",
)  # fmt: skip
_ENDS = (
    "", "", ", as far as anyone can tell", ", although few would say so today", " for more than a decade",
    ", which surprised the reviewers", " until the rules were changed", ", and the reasons are still debated",
    " in all but name", ", at least on paper", " when the season allowed it", ", much to the delight of the students",
)  # fmt: skip


def sentences(draw: Draw) -> Iterator[str]:
    while True:
        words = f"{draw.choice(_SUBJECTS)} {draw.choice(_VERBS)} {draw.choice(_OBJECTS)}{draw.choice(_ENDS)}."
        yield words[0].upper() + words[1:]


def noise(draw: Draw) -> Iterator[str]:
    return itertools.repeat(NOISE)


def of_text(text: str) -> Haystack:
    """The text's own sentences from a drawn one on, over and over; RULER takes essays this way."""
    own = [sentence for sentence in re.split(r"(?<=[.!?])\s+", text) if sentence.strip()]

    def take(draw: Draw) -> Iterator[str]:
        start = draw.below(len(own))
        return itertools.cycle(own[start:] + own[:start])

    return take


class Units:
    """The first of an endless row of units, however many are asked for."""

    def __init__(self, units: Iterator[str]) -> None:
        self._units, self._taken = units, list[str]()

    def first(self, count: int) -> list[str]:
        self._taken += itertools.islice(self._units, max(count - len(self._taken), 0))
        return self._taken[:count]


def hide(hidden: Sequence[str], places: Sequence[float], among: list[str]) -> list[str]:
    """`hidden` in their order, at rising `places` from 0 to 1 of the way."""
    found = list(among)
    for place, unit in reversed(list(zip(places, hidden, strict=True))):
        found.insert(int(place * (len(among) + 1)), unit)
    return found


def places(draw: Draw, count: int) -> list[float]:
    return sorted(draw.fraction() for _ in range(count))
