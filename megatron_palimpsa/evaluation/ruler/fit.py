"""Samples of exactly so many tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_palimpsa.config import ConfigError

if TYPE_CHECKING:
    from megatron_palimpsa.evaluation.ruler.tasks import RulerTask

Tokens = Callable[[Sequence[str]], Sequence[int]]
"""Texts -> how many tokens each of them has."""

_TRIES = 20
_MARK = "\0"
_NEAR = 500  # characters


@dataclass(frozen=True)
class Puzzle:
    """A task's sample without its length."""

    text: Callable[[int, str], str]
    """The prompt with so many units of filler and, where the filler ends, so much of `padding`."""
    answers: tuple[str, ...]
    padding: str
    """More of the filler's kind than a unit has; the last tokens are filled up with its beginning, cut anywhere."""


@dataclass(frozen=True)
class Sample:
    """A prompt that with the answer's tokens has exactly the wanted length."""

    prompt: str
    answers: tuple[str, ...]


def make_sample(task: RulerTask, length: int, seed: int, index: int, tokens: Tokens) -> Sample:
    """Sample `index` of the endless series of a task, a length and a seed.

    The facts depend on these alone; how much filler stands between them depends on the tokenizer.

    Args:
        length: tokens of the prompt and of the `task.answer_tokens` that may be generated.

    Raises:
        ConfigError: the task does not fit into the length, or no filling has exactly that many tokens.
    """
    wanted = length - task.answer_tokens
    puzzle = task.puzzle(length, seed, index)

    def size(text: str) -> int:
        return tokens([text])[0]

    if size(puzzle.text(0, "")) > wanted:
        raise ConfigError(f"task ruler/{task.name}: does not fit into {length} tokens; take longer samples (--lengths)")
    units = _most(lambda count: size(puzzle.text(count, "")), wanted)
    for fewer in range(min(_TRIES, units + 1)):
        before, after = puzzle.text(units - fewer, _MARK).split(_MARK)
        if (padding := _padding(size, before, puzzle.padding, after, wanted)) is not None:
            return Sample(before + padding + after, puzzle.answers)
    raise ConfigError(
        f"task ruler/{task.name}: no text has exactly {wanted} tokens with this tokenizer; try another --seed"
    )


def _most(size: Callable[[int], int], wanted: int) -> int:
    """Units with which the prompt is still no longer than `wanted`, one more being too long."""
    low, low_size, high = 0, size(0), None
    step = 16
    while high is None:
        found = size(low + step)
        if found > wanted:
            high, high_size = low + step, found
        else:
            rate = max((found - low_size) / step, 1e-3)
            low, low_size = low + step, found
            step = max(int((wanted - found) / rate) + 1, 1)
    turn = 0
    while high - low > 1:
        turn += 1
        # The size is nearly proportional to the units; halving now and then ends the search where it is not.
        share = 0.5 if turn % 3 == 2 else (wanted - low_size) / max(high_size - low_size, 1)
        middle = min(max(low + int((high - low) * share), low + 1), high - 1)
        found = size(middle)
        if found > wanted:
            high, high_size = middle, found
        else:
            low, low_size = middle, found
    return low


def _padding(size: Callable[[str], int], before: str, padding: str, after: str, wanted: int) -> str | None:
    """A beginning of `padding` that gives exactly `wanted` tokens; None if none was found.

    What stands far from it has the same tokens whatever it is, nearly always: it is looked for in what is near, and
    the whole is measured with what was found.
    """
    near, behind = before[-_NEAR:], after[:_NEAR]
    far = size(before + after) - size(near + behind)
    for _ in range(_TRIES):
        found = _beginning(lambda text: size(near + text + behind), padding, wanted - far)
        if found is None:
            return None
        off = size(before + found + after) - wanted
        if not off:
            return found
        far += off
    return None


def _beginning(size: Callable[[str], int], padding: str, wanted: int) -> str | None:
    low, high = 0, len(padding)
    if size("") == wanted:
        return ""
    # A character more is a token more, or none, nearly always: the number is passed on the way up.
    while high - low > 1:
        middle = (low + high) // 2
        found = size(padding[:middle])
        if found == wanted:
            return padding[:middle]
        low, high = (middle, high) if found < wanted else (low, middle)
    close = range(max(low - 8, 1), min(low + 8, len(padding)) + 1)
    return next((padding[:end] for end in close if size(padding[:end]) == wanted), None)
