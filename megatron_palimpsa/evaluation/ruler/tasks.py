"""RULER's tasks with its settings, by its names."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from palimpsa_data.needles.draws import Draw

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.evaluation.ruler import aggregation, haystack, questions, retrieval
from megatron_palimpsa.evaluation.ruler.fit import Puzzle
from megatron_palimpsa.evaluation.ruler.haystack import Haystack

_EVALUATION = 0x6576616C  # sets these seeds apart from training's


@dataclass(frozen=True)
class RulerTask:
    """One of RULER's tasks."""

    name: str
    answer_tokens: int
    """That are generated at the most."""
    make: Callable[[Draw, int, int], Puzzle]
    """Of a draw, a length and an index."""
    any_answer: bool = False
    """One of the answers is enough."""

    def puzzle(self, length: int, seed: int, index: int) -> Puzzle:
        return self.make(Draw(_EVALUATION, zlib.crc32(self.name.encode()), seed, length, index), length, index)

    def score(self, prediction: str, answers: Sequence[str]) -> float:
        """Share of the answers that the prediction holds, in small or capital letters; 0 or 1 for `any_answer`."""
        text = re.sub(r"[\x00-\x1f]", "\n", prediction).lower()
        found = [answer.lower() in text for answer in answers]
        return float(any(found)) if self.any_answer else sum(found) / len(found)


_RETRIEVAL = {
    "niah_single_1": retrieval.SINGLE_1,
    "niah_single_2": retrieval.SINGLE_2,
    "niah_single_3": retrieval.SINGLE_3,
    "niah_multikey_1": retrieval.MULTIKEY_1,
    "niah_multikey_2": retrieval.MULTIKEY_2,
    "niah_multikey_3": retrieval.MULTIKEY_3,
    "niah_multivalue": retrieval.MULTIVALUE,
    "niah_multiquery": retrieval.MULTIQUERY,
}
_AGGREGATION = {
    "vt": (30, aggregation.variable_tracking),
    "cwe": (120, aggregation.common_words),
    "fwe": (50, aggregation.frequent_words),
}
_QUESTIONS = {
    "qa_squad": ("squad.json", questions.read_squad),
    "qa_hotpotqa": ("hotpotqa.json", questions.read_hotpotqa),
}
GENERATED = (*_RETRIEVAL, *_AGGREGATION)
NAMES = (*GENERATED, *_QUESTIONS)
_RETRIEVAL_TOKENS, _QUESTION_TOKENS = 128, 32


@dataclass(frozen=True)
class Sources:
    """What is taken from `--data`: `ruler/essays/*.txt` if there are any, `ruler/squad.json`, `ruler/hotpotqa.json`."""

    data: Path | None

    def task(self, name: str) -> RulerTask:
        """A task by its name.

        Raises:
            ConfigError: its questions' file is missing or not readable.
        """
        if name in _RETRIEVAL:
            hay, settings = self._haystack(), _RETRIEVAL[name]
            return RulerTask(name, _RETRIEVAL_TOKENS, lambda draw, length, index: settings.puzzle(draw, hay))
        if name in _AGGREGATION:
            tokens, make = _AGGREGATION[name]
            return RulerTask(name, tokens, lambda draw, length, index: make(draw, length))
        file, read = _QUESTIONS[name]
        if self.data is None or not (place := self.data / "ruler" / file).is_file():
            raise ConfigError(f"task ruler/{name}: needs the file ruler/{file} below --data FOLDER")
        asked = read(place)
        return RulerTask(name, _QUESTION_TOKENS, lambda draw, length, index: asked.puzzle(draw, index), any_answer=True)

    @property
    def essays(self) -> str | None:
        """sha256 of the text that is the haystack; None where sentences are made."""
        text = self._text()
        return None if text is None else hashlib.sha256(text.encode()).hexdigest()

    def _haystack(self) -> Haystack:
        text = self._text()
        return haystack.sentences if text is None else haystack.of_text(text)

    def _text(self) -> str | None:
        places = [] if self.data is None else sorted((self.data / "ruler" / "essays").glob("*.txt"))
        text = " ".join(place.read_text(errors="replace").replace("\0", "") for place in places)
        return text if text.strip() else None
