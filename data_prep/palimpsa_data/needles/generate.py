"""Documents of a wanted number of tokens around the tasks' puzzles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from palimpsa_data.documents import Document, Example
from palimpsa_data.errors import DataError
from palimpsa_data.needles.draws import Draw
from palimpsa_data.needles.tasks import TASKS, Puzzle
from palimpsa_data.sources.options import option

Tokens = Callable[[Sequence[str]], Sequence[int]]
"""Texts -> how many tokens each of them has."""

_TRAINING = 0x7261696E  # sets these seeds apart from evaluation's
_SHORTEST = 512
_AT_ONCE = 64
_LOSSES = ("answer", "all")


@dataclass(frozen=True)
class NeedleOptions:
    """What to make. Lengths are in tokens, the end-of-document id included.

    Raises:
        DataError: an unknown task, or numbers that cannot be.
    """

    documents: int = option(1000, "how many documents (%(default)s)")
    shards: int = option(1, "how many shards they are spread over (%(default)s)")
    shortest: int = option(4096, "tokens of the shortest document (%(default)s)")
    longest: int = option(32768, "tokens of the longest; lengths between the two are evenly spread in their logarithm")
    seed: int = option(0, "another seed gives other documents (%(default)s)")
    tasks: tuple[str, ...] = option(tuple(TASKS), f"of these, by their names: {', '.join(TASKS)}", metavar="NAME")
    loss: str = option("answer", "train on the answer alone, or on all of the document (%(default)s)", metavar="PART")

    def __post_init__(self) -> None:
        if unknown := [task for task in self.tasks if task not in TASKS]:
            raise DataError(f"--tasks: unknown task {unknown[0]!r}; known ones are {', '.join(TASKS)}")
        if not self.tasks:
            raise DataError(f"--tasks: name one at least of {', '.join(TASKS)}")
        if not 1 <= self.shards <= self.documents:
            raise DataError(f"--documents {self.documents} in --shards {self.shards}: each needs one at least")
        if self.seed < 0:
            raise DataError(f"--seed must not be negative, as {self.seed} is")
        if not _SHORTEST <= self.shortest <= self.longest:
            raise DataError(
                f"--shortest {self.shortest} --longest {self.longest}: {_SHORTEST} is the least, the latter not below "
                "the former"
            )
        if self.loss not in _LOSSES:
            raise DataError(f"--loss takes {' or '.join(_LOSSES)}, not {self.loss!r}")


def needle(options: NeedleOptions, index: int, tokens: Tokens) -> Document | Example:
    """Document `index` of the endless series that the seed gives.

    It is as long as was drawn or a sentence shorter, never longer; `source` is the task. With another tokenizer the
    facts are the same, the filler between them is not.
    """
    draw = Draw(_TRAINING, options.seed, index)
    task = draw.choice(options.tasks)
    ratio = options.longest / options.shortest
    length = int(options.shortest * ratio ** draw.fraction())
    puzzle = TASKS[task](draw, length)
    return _Fitting(puzzle, draw, tokens, task, options.loss).fit(length)


class _Fitting:
    def __init__(self, puzzle: Puzzle, draw: Draw, tokens: Tokens, task: str, loss: str) -> None:
        self._puzzle, self._draw, self._tokens, self._task, self._loss = puzzle, draw, tokens, task, loss
        self._places = sorted(draw.fraction() for _ in puzzle.hidden)

    def fit(self, length: int) -> Document | Example:
        """Fill up until it is too long, then take away until it is not."""
        filler: list[str] = []
        sizes: list[int] = []
        while (excess := self._size(self._item(filler)) - length) < 0:
            self._extend(filler, sizes, -excess)
        while excess > 0:
            if not filler:
                raise DataError(f"needles: {self._task} does not fit into {length} tokens; ask for longer documents")
            while filler and excess > 0:
                filler.pop()
                excess -= sizes.pop()
            excess = self._size(self._item(filler)) - length
        return self._item(filler)

    def _extend(self, filler: list[str], sizes: list[int], room: int) -> None:
        """Add units for `room` tokens, about; `sizes` are the tokens of each with its separator."""
        while room > 0:
            units = [self._puzzle.filler(self._draw) for _ in range(_AT_ONCE)]
            counts = [max(count, 1) for count in self._tokens([unit + self._puzzle.separator for unit in units])]
            filler += units
            sizes += counts
            room -= sum(counts)

    def _item(self, filler: Sequence[str]) -> Document | Example:
        units = list(filler)
        for place, hidden in reversed(list(zip(self._places, self._puzzle.hidden, strict=True))):
            units.insert(int(place * (len(filler) + 1)), hidden)
        text = f"{self._puzzle.intro}\n\n{self._puzzle.separator.join(units)}\n{self._puzzle.question}"
        answer = f" {self._puzzle.answer}"
        if self._loss == "all":
            return Document(text + answer, self._task)
        return Example(text, "", "", answer, self._task)

    def _size(self, item: Document | Example) -> int:
        texts = [item.text] if isinstance(item, Document) else [item.prompt, item.answer]
        return sum(self._tokens(texts)) + 1
