"""LongBench v2 (Bai et al. 2024, 2412.15204): multiple choice about long texts, from a local file.

A prompt that is too long loses the middle of its tokens, as in the benchmark's own code: the instructions at its
beginning and the question at its end stay. How many did, and how much of them is left, is part of the result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.evaluation.continuations import continue_prompts
from megatron_palimpsa.evaluation.results import Metric, TaskResult, mean
from megatron_palimpsa.evaluation.scorer import Scorer, Truncation
from megatron_palimpsa.evaluation.spans import Span

GENERATED, CHOSEN = "longbench_v2", "longbench_v2_choice"
FILES = ("longbench_v2.json", "longbench_v2.jsonl", "THUDM/LongBench-v2/data.json")
"""Below `--data`; the first that is there."""

_LETTERS = "ABCD"
_ANSWER_TOKENS = 128
# The wording is the benchmark's.
_QUESTION = (
    "Please read the following text and answer the question below.\n\n<text>\n{context}\n</text>\n\n"
    "What is the correct answer to this question: {question}\nChoices:\n(A) {A}\n(B) {B}\n(C) {C}\n(D) {D}\n\n"
)
_FORMAT = 'Format your response as follows: "The correct answer is (insert answer here)".'
_BEGUN = "The correct answer is ("


@dataclass(frozen=True)
class Item:
    id: str
    prompt: str
    answer: str
    """A, B, C or D."""
    groups: tuple[str, ...]
    """Its difficulty and its length in the benchmark's words."""


def find_file(data: Path | None) -> Path:
    """Raises ConfigError naming task and folder where it is not there."""
    if data is not None:
        for name in FILES:
            if (data / name).is_file():
                return data / name
    raise ConfigError(f"task {GENERATED}: needs one of the files {', '.join(FILES)} below --data FOLDER ({data})")


def read_items(path: Path) -> list[Item]:
    """Of a JSON array or of JSON lines with the fields that the benchmark gives them.

    Raises:
        ConfigError: names the file, the entry and what is wrong with it.
    """
    try:
        text = path.read_text()
        entries = [json.loads(line) for line in text.splitlines() if line.strip()] if path.suffix == ".jsonl" else None
        entries = json.loads(text) if entries is None else entries
    except (OSError, ValueError) as error:
        raise ConfigError(f"task {GENERATED}: {path} cannot be read ({error})") from None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"task {GENERATED}: {path} holds no list of questions")
    return [_item(entry, f"{path}, entry {number}") for number, entry in enumerate(entries, 1)]


def _item(entry: Any, where: str) -> Item:
    try:
        choices = {letter: entry[f"choice_{letter}"].strip() for letter in _LETTERS}
        prompt = _QUESTION.format(context=entry["context"].strip(), question=entry["question"].strip(), **choices)
        answer, groups = entry["answer"], tuple(str(entry[key]) for key in ("difficulty", "length") if key in entry)
        made = Item(str(entry.get("_id", where)), prompt, answer, groups)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"task {GENERATED}: {where} is no question of LongBench v2 ({error!r})") from None
    if answer not in tuple(_LETTERS):
        raise ConfigError(f"task {GENERATED}: {where}: the answer {answer!r} is none of {', '.join(_LETTERS)}")
    return made


def require_room(scorer: Scorer) -> None:
    """Raises ConfigError where too little is left of a prompt beside the answer for it to be one."""
    if scorer.max_length is not None and scorer.max_length < 2 * _ANSWER_TOKENS:
        raise ConfigError(
            f"task {GENERATED}: of --max-length {scorer.max_length} tokens {_ANSWER_TOKENS} are the answer's; "
            f"give {2 * _ANSWER_TOKENS} or more (0: any)"
        )


def generate(items: Sequence[Item], scorer: Scorer) -> TaskResult:
    """The benchmark's own way: the answer is the letter that the model writes; none counts as wrong."""
    truncation = Truncation()
    encoded = scorer.encode([item.prompt + _FORMAT for item in items])
    room = None if scorer.max_length is None else scorer.max_length - _ANSWER_TOKENS
    prompts = [without_middle(ids, room, truncation) for ids in encoded]
    texts = continue_prompts(scorer, prompts, _ANSWER_TOKENS)
    return _result(GENERATED, items, [extract(text) for text in texts], truncation)


def choose(items: Sequence[Item], scorer: Scorer) -> TaskResult:
    """The answer is the likeliest of the four letters behind the beginning of the answer's sentence."""
    truncation = Truncation()
    spans = []
    for letter in _LETTERS:
        for span in scorer.encode_pairs([(item.prompt + _BEGUN, letter) for item in items]):
            assert span is not None
            spans.append(_shortened(span, scorer.max_length, truncation if letter == "A" else Truncation()))
    sums = [float(found.log_probabilities.sum(dtype=np.float64)) for found in scorer.score(spans)]
    best = np.array(sums).reshape(len(_LETTERS), len(items)).argmax(0)
    return _result(CHOSEN, items, [_LETTERS[place] for place in best], truncation)


def without_middle(ids: np.ndarray, most: int | None, truncation: Truncation) -> np.ndarray:
    """At most so many ids: half of them from the beginning, half from the end."""
    kept = ids if most is None or len(ids) <= most else np.concatenate([ids[: most // 2], ids[most // 2 - most :]])
    truncation.count(len(ids), len(kept))
    return kept


def extract(text: str) -> str | None:
    """The letter in `The correct answer is (B)`, else in `The correct answer is B`; asterisks do not count."""
    text = text.replace("*", "")
    found = re.search(r"The correct answer is \(([A-D])\)", text) or re.search(r"The correct answer is ([A-D])", text)
    return found[1] if found else None


def _shortened(span: Span, max_length: int | None, truncation: Truncation) -> Span:
    scored = len(span.ids) - span.first
    most = None if max_length is None else max_length + 1 - scored
    context = without_middle(span.ids[: span.first], most, truncation)
    return Span(np.concatenate([context, span.ids[span.first :]]), len(context))


def _result(task: str, items: Sequence[Item], answers: Sequence[str | None], truncation: Truncation) -> TaskResult:
    right = [float(item.answer == answer) for item, answer in zip(items, answers, strict=True)]
    metrics = {"acc": mean(right)}
    for group in sorted({group for item in items for group in item.groups}):
        metrics[f"acc_{group}"] = mean(
            [score for item, score in zip(items, right, strict=True) if group in item.groups]
        )
    metrics["answered"] = Metric(sum(answer is not None for answer in answers) / len(items))
    given = [{"id": item.id, "answer": answer} for item, answer in zip(items, answers, strict=True)]
    return TaskResult(task, len(items), metrics, {"truncation": vars(truncation), "answers": given})
