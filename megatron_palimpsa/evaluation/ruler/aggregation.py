"""Variables that take over values, words that come up most often in a list or in a coded text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from palimpsa_data.needles.draws import Draw

from megatron_palimpsa.evaluation.ruler.fit import Puzzle
from megatron_palimpsa.evaluation.ruler.haystack import NOISE, Units, hide, noise, places
from megatron_palimpsa.evaluation.ruler.words import coded_word, distinct, list_word, number, variable

# The wording is the benchmark's, misspelling included.
_TRACE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: Find "
    "all variables that are assigned the value {value} in the text above. Answer: According to the chain(s) of "
    "variable assignment in the text above, {count} variables are assgined the value {value}, they are:"
)
_COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 "
    "words that appear most often in the list are:"
)
_FREQUENT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text? Answer: According to the coded text above, the "
    "three most frequently appeared words are:"
)

_HOPS = 4
_EXAMPLE_NOISE = 5


def variable_tracking(draw: Draw, length: int) -> Puzzle:
    """One chain of 5 variables, all asked for; a short example comes first."""
    example_chain = distinct(variable, draw, _HOPS + 1)
    chain = [name for name in distinct(variable, draw, 2 * (_HOPS + 1)) if name not in example_chain][: _HOPS + 1]
    first, value = distinct(number, draw, 2)
    lines = hide(_assignments(example_chain, first), places(draw, _HOPS + 1), [NOISE] * _EXAMPLE_NOISE)
    example = " ".join([_trace("\n".join(lines), first), *example_chain])
    hidden, spots = _assignments(chain, value), places(draw, _HOPS + 1)
    units = Units(noise(draw))

    def render(count: int, padding: str) -> str:
        context = "\n".join(hide(hidden, spots, units.first(count))) + padding
        return f"{example}\n\n{_trace(context, value)}"

    return Puzzle(render, tuple(chain), f"\n{NOISE}\n{NOISE}")


def _assignments(chain: Sequence[str], value: str) -> list[str]:
    copies = [f"VAR {name} = VAR {other}" for other, name in itertools.pairwise(chain)]
    return [f"VAR {chain[0]} = {value}", *copies]


def _trace(context: str, value: str) -> str:
    return _TRACE.format(context=context, value=value, count=_HOPS + 1)


_COMMON_WORDS = 10
_UNCOMMON_TIMES = 3
_EXAMPLE_TIMES, _EXAMPLE_OTHERS = 3, 10


def common_words(draw: Draw, length: int) -> Puzzle:
    """Ten words 30 times each among words that stand there three times; a short example comes first.

    Below 4096 tokens, where RULER is not defined, the ten stand there less often.
    """
    often = min(30, max(2 * _UNCOMMON_TIMES, length * 30 // 4096))
    drawn = _distinct_words(draw)
    example_words = list(itertools.islice(drawn, _COMMON_WORDS + _EXAMPLE_OTHERS))
    common = list(itertools.islice(drawn, _COMMON_WORDS))
    example_list = draw.shuffled(example_words[:_COMMON_WORDS] * _EXAMPLE_TIMES + example_words[_COMMON_WORDS:])
    example_answer = _numbered(example_words[:_COMMON_WORDS])
    example = f"{_COMMON.format(context=_numbered(example_list))} {example_answer}"
    units = Units(drawn)
    order = draw.below(2**32)
    more = _numbered(list(itertools.islice(_distinct_words(draw), 30)))

    def render(count: int, padding: str) -> str:
        listed = Draw(order, count).shuffled(common * often + units.first(count) * _UNCOMMON_TIMES)
        return f"{example}\n\n{_COMMON.format(context=_numbered(listed) + padding)}"

    return Puzzle(render, tuple(common), f" {more}")


def _distinct_words(draw: Draw) -> Iterator[str]:
    found: set[str] = set()
    while True:
        if (made := list_word(draw)) not in found:
            found.add(made)
            yield made


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{place}. {word}" for place, word in enumerate(words, 1))


_ALPHA = 2.0
_ZETA = math.pi**2 / 6  # zeta(_ALPHA)
_FEWEST_WORDS = 60
_DOTS = "..."


def frequent_words(draw: Draw, length: int) -> Puzzle:
    """The k-th word stands there in proportion to k^-2; the first is dots, the next three are asked for."""
    vocabulary = [_DOTS, *distinct(coded_word, draw, max(length // 50, 10))]
    order = draw.below(2**32)

    def render(count: int, padding: str) -> str:
        total = _FEWEST_WORDS + count  # with fewer the three are not apart
        words = [word for rank, word in enumerate(vocabulary, 1) for _ in range(int(total * rank**-_ALPHA / _ZETA))]
        return _FREQUENT.format(context=" ".join(Draw(order, count).shuffled(words)) + padding)

    return Puzzle(render, tuple(vocabulary[1:4]), f" {_DOTS}" * 50)
