"""The task families: what is hidden, among what, the question and its answer."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from palimpsa_data.needles.draws import Draw
from palimpsa_data.needles.filler import sentence
from palimpsa_data.needles.names import values, word, words


@dataclass(frozen=True)
class Puzzle:
    """Everything of a document but its length.

    `hidden` are the units that must be there, in this order; `filler` gives those between them one after the other.
    The answer is right after any number of them.
    """

    intro: str
    hidden: Sequence[str]
    filler: Callable[[Draw], str]
    question: str
    answer: str
    separator: str = " "


_FACTS = (
    "Note that the locker of {key} opens with {value}.",
    "According to the register, {key} was filed under {value}.",
    "The ticket that {key} holds reads {value}.",
    "Whoever asks for {key} is told {value}.",
)
_KINDS = ("locker code", "register number", "ticket", "reply")
_INTRO = (
    "Somewhere in the pages below a few records have been slipped in. Keep them in mind; a question follows.",
    "Read on to the end. Between the lines stand records that you will be asked about.",
    "What follows is a long account with some records in between. Afterwards you are asked for them.",
)
_ANSWER = "\nAnswer:"


def single(draw: Draw, length: int) -> Puzzle:
    """One record among sentences."""
    return _records(draw, keys=1, asked=1)


def multi_key(draw: Draw, length: int) -> Puzzle:
    """Several records, one of them asked for; in a third of the documents nothing but records."""
    return _records(draw, keys=_several(draw, length), asked=1, dense=draw.below(3) == 0)


def multi_value(draw: Draw, length: int) -> Puzzle:
    """Several records of one key, all asked for, in their order."""
    count = _several(draw, length)
    kind = draw.below(len(_FACTS))
    (key,) = words(draw, 1)
    found = values(draw, count)
    question = f"\nQuestion: which {count} records ({_KINDS[kind]}) belong to {key}, in the order of the text?"
    facts = [_FACTS[kind].format(key=key, value=value) for value in found]
    return Puzzle(draw.choice(_INTRO), facts, sentence, question + _ANSWER, ", ".join(found))


def multi_query(draw: Draw, length: int) -> Puzzle:
    """Several records, more than one of them asked for."""
    keys = _several(draw, length)
    return _records(draw, keys=keys, asked=draw.between(2, keys))


def _records(draw: Draw, keys: int, asked: int, dense: bool = False) -> Puzzle:
    kind = draw.below(len(_FACTS))
    names, found = words(draw, keys), values(draw, keys)
    facts = [_FACTS[kind].format(key=name, value=value) for name, value in zip(names, found, strict=True)]
    wanted = draw.shuffled(range(keys))[:asked]
    question = f"\nQuestion: which {_KINDS[kind]} belongs to {', which to '.join(names[i] for i in wanted)}?"
    taken = set(names)

    def other_record(draw: Draw) -> str:
        name = word(draw)
        while name in taken:
            name = word(draw)
        return _FACTS[kind].format(key=name, value=values(draw, 1)[0])

    filler = other_record if dense else sentence
    return Puzzle(draw.choice(_INTRO), facts, filler, question + _ANSWER, ", ".join(found[i] for i in wanted))


_START = ("{name} starts out as {value}.", "At first {name} is set to {value}.")
_COPY = ("Then {name} takes over what {other} has.", "{name} becomes the same as {other}.")


def variable_tracing(draw: Draw, length: int) -> Puzzle:
    """Chains of names that take over each other's value; all names that end up with one value are asked for."""
    hops, chains = draw.between(1, _several(draw, length)), draw.between(1, _several(draw, length))
    names, starts = words(draw, chains * (hops + 1)), values(draw, chains)
    start, copy = draw.choice(_START), draw.choice(_COPY)
    lines: list[list[str]] = []
    for chain in range(chains):
        own = names[chain * (hops + 1) : (chain + 1) * (hops + 1)]
        steps = [copy.format(name=name, other=other) for other, name in itertools.pairwise(own)]
        lines.append([start.format(name=own[0], value=starts[chain]), *steps])
    question = f"\nQuestion: which names have the value {starts[0]} at the end? Begin with the first."
    return Puzzle(
        "In the text below names are given values, and names take over values from each other. Follow them.",
        _merged(draw, lines),
        sentence,
        question + _ANSWER,
        ", ".join(names[: hops + 1]),
    )


def _merged(draw: Draw, lines: list[list[str]]) -> list[str]:
    """All lines, each list in its own order, the lists mixed."""
    order = draw.shuffled([number for number, own in enumerate(lines) for _ in own])
    iterators = [iter(own) for own in lines]
    return [next(iterators[number]) for number in order]


_RARE = 3


def common_words(draw: Draw, length: int) -> Puzzle:
    """A list in which some words stand many times, the others three times at most; the former are asked for."""
    count = max(2, min(10, length // 400))
    often = max(5, min(30, length // 300))
    common = words(draw, count)
    used = Counter(dict.fromkeys(common, _RARE))
    rare: list[str] = []

    def rare_word(draw: Draw) -> str:
        chosen = draw.choice(rare) if rare and draw.below(2) else word(draw)
        while used[chosen] >= _RARE:
            chosen = word(draw)
        if not used[chosen]:
            rare.append(chosen)
        used[chosen] += 1
        return chosen

    question = f"\nQuestion: the {count} words that are listed most often, in alphabetical order?"
    return Puzzle(
        "A list of words, some of them listed far more often than the rest. Find out which.",
        draw.shuffled(common * often),
        rare_word,
        question + _ANSWER,
        ", ".join(sorted(common)),
        separator="; ",
    )


def frequent_words(draw: Draw, length: int) -> Puzzle:
    """A text of invented words, the k-th drawn in proportion to k^-1.2; the three most frequent are asked for."""
    vocabulary = words(draw, max(6, min(400, length // 30)))
    sums = list(itertools.accumulate((rank + 1) ** -1.2 for rank in range(len(vocabulary))))
    counts = [4, 3, 2, *[0] * (len(vocabulary) - 3)]
    first = [name for name, count in zip(vocabulary, counts, strict=True) for _ in range(count)]

    def drawn(draw: Draw) -> str:
        """The first three stay in front, in their order and without a tie, after every word."""
        rank = bisect.bisect_right(sums, draw.fraction() * sums[-1])
        while rank and counts[rank] + 1 >= counts[min(rank - 1, 2)]:
            rank = min(rank - 1, 2)
        counts[rank] += 1
        return vocabulary[rank]

    return Puzzle(
        "This message is written in a secret language. Count how often each of its words comes up.",
        draw.shuffled(first),
        drawn,
        "\nQuestion: its three most frequent words, the most frequent first?" + _ANSWER,
        ", ".join(vocabulary[:3]),
    )


def _several(draw: Draw, length: int) -> int:
    """How many things of a kind: two to four in a short text, up to eight in a long one."""
    return draw.between(2, max(4, min(8, length // 1024)))


TASKS: dict[str, Callable[[Draw, int], Puzzle]] = {
    "single": single,
    "multi-key": multi_key,
    "multi-value": multi_value,
    "multi-query": multi_query,
    "variable-tracing": variable_tracing,
    "common-words": common_words,
    "frequent-words": frequent_words,
}
