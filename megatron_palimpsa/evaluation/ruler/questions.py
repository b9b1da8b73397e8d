"""Questions about documents (SQuAD, HotpotQA) among documents of other questions; from files of the user's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from palimpsa_data.needles.draws import Draw

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.evaluation.ruler.fit import Puzzle
from megatron_palimpsa.evaluation.ruler.haystack import Units, hide, places

# The wording is the benchmark's.
_ASK = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{context}\n\nAnswer the question based on the given documents. Only give me "
    "the answer and do not output any other words.\n\nQuestion: {question} Answer:"
)
_PADDING_DOCUMENTS = 20


@dataclass(frozen=True)
class Question:
    text: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]
    """Those that the answer needs."""


@dataclass(frozen=True)
class Questions:
    """All of a file; `documents` are every question's."""

    questions: tuple[Question, ...]
    documents: tuple[str, ...]

    def puzzle(self, draw: Draw, index: int) -> Puzzle:
        """Question `index` (from the first one again behind the last) among documents that it does not need."""
        asked = self.questions[index % len(self.questions)]
        hidden, spots = draw.shuffled(asked.documents), places(draw, len(asked.documents))
        units = Units(self._others(draw, set(asked.documents)))
        more = " ".join(islice(self._others(Draw(draw.below(2**32)), set(asked.documents)), _PADDING_DOCUMENTS))

        def render(count: int, padding: str) -> str:
            documents = hide(hidden, spots, units.first(count))
            context = "\n\n".join(f"Document {place}:\n{text}" for place, text in enumerate(documents, 1))
            return _ASK.format(context=context + padding, question=asked.text)

        return Puzzle(render, asked.answers, f" {more}")

    def _others(self, draw: Draw, taken: set[str]) -> Iterator[str]:
        while True:
            if (document := draw.choice(self.documents)) not in taken:
                yield document


def read_squad(path: Path) -> Questions:
    """Of a SQuAD file (1.1 or 2.0); questions without an answer are left out."""
    content = _load(path)
    try:
        paragraphs = [paragraph for article in content["data"] for paragraph in article["paragraphs"]]
        questions = [
            Question(entry["question"], tuple(answer["text"] for answer in entry["answers"]), (paragraph["context"],))
            for paragraph in paragraphs
            for entry in paragraph["qas"]
            if entry["answers"] and not entry.get("is_impossible")
        ]
        return _checked(path, questions, [paragraph["context"] for paragraph in paragraphs])
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{path}: is no SQuAD file ({error!r})") from None


def read_hotpotqa(path: Path) -> Questions:
    """Of a HotpotQA file with distractors."""
    content = _load(path)
    try:
        questions: list[Question] = []
        documents: list[str] = []
        for entry in content:
            own = {title: f"{title}\n{''.join(sentences)}" for title, sentences in entry["context"]}
            needed = {title for title, _ in entry["supporting_facts"]}
            kept = tuple(text for title, text in own.items() if title in needed)
            questions.append(Question(entry["question"], (entry["answer"],), kept))
            documents += own.values()
        return _checked(path, questions, documents)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: is no HotpotQA file ({error!r})") from None


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_text().replace("\\u0000", ""))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None


def _checked(path: Path, questions: list[Question], documents: list[str]) -> Questions:
    distinct = tuple(dict.fromkeys(documents))
    if not questions or len(distinct) <= max(len(question.documents) for question in questions):
        raise ConfigError(f"{path}: holds too few questions or documents")
    return Questions(tuple(questions), distinct)
