"""Texts through a model: likelihoods of continuations and of whole texts, and greedy or sampled continuations."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from time import monotonic

import numpy as np
from palimpsa_data.tokenizers import Tokenizer, UncuttableError

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.evaluation.spans import Span, SpanScores, score_spans
from megatron_palimpsa.inference import Opened
from megatron_palimpsa.training.console import clock

logger = logging.getLogger(__name__)

_SAY_EVERY = 15.0


@dataclass
class Truncation:
    """What was left out of inputs because they were too long."""

    inputs: int = 0
    tokens: int = 0
    longest: int = 0
    """Tokens of the longest input before."""

    def count(self, length: int, kept: int) -> None:
        if kept < length:
            self.inputs += 1
            self.tokens += length - kept
            self.longest = max(self.longest, length)


class Progress:
    """Says now and then how far a task is and how long it will take."""

    def __init__(self, what: str, unit: str = "tokens") -> None:
        self._what, self._unit = what, unit
        self._start = self._said = monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = monotonic()
        if now - self._said >= _SAY_EVERY and done:
            self._said = now
            left = (now - self._start) / done * (total - done)
            share = 100 * done / total
            logger.info("%s: %.0f %% of %s %s, %s left", self._what, share, f"{total:,}", self._unit, clock(left))


class Scorer:
    """A model with its tokenizer.

    Inputs longer than `max_length` tokens lose their beginning, as in lm-evaluation-harness; `truncation` counts them.
    A text without context follows the end-of-document id.

    Args:
        max_length: None truncates nothing: layers with a state read texts of any length.
        batch_tokens: tokens that go through the model at once.

    Raises:
        ConfigError: the model has no tokenizer, or one of another vocabulary.
    """

    def __init__(self, it: Opened, max_length: int | None, batch_tokens: int) -> None:
        if it.tokenizer is None:
            raise ConfigError(f"{it.checkpoint}: the model names no tokenizer; name its file with --tokenizer")
        vocabulary = it.config.model.vocab_size
        if it.tokenizer.vocab_size > vocabulary:
            raise ConfigError(
                f"{it.tokenizer.path}: {it.tokenizer.vocab_size} ids, but the model in {it.checkpoint} has {vocabulary}"
            )
        self.model = it.model
        self.tokenizer: Tokenizer = it.tokenizer
        self.max_length = max_length
        self.batch_tokens = batch_tokens
        self.truncation = Truncation()
        self.task = ""
        """Named in what is logged."""

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids [T] of each text, without a token before or behind it.

        Raises:
            ConfigError: a text cannot be tokenized.
        """
        try:
            return self.tokenizer.encode_batch(texts)
        except (UncuttableError, UnicodeEncodeError) as error:
            raise ConfigError(f"task {self.task}: a text of its data cannot be tokenized: {error}") from None

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Span | None]:
        """(context, continuation) -> the ids of both together; None where the continuation has no id.

        The ids are those of the whole text, cut where the ids of the context alone end, or before the first one that
        the continuation changes. Spaces at the context's end belong to the continuation: tokenizers put them before a
        word.
        """
        # A batch is many times faster than a text at a time.
        moved = [_spaces_moved(*pair) for pair in pairs]
        wholes = self.encode([context + continuation for context, continuation in moved])
        contexts = self.encode([context for context, _ in moved])
        spans: list[Span | None] = []
        for whole, context in zip(wholes, contexts, strict=True):
            first = _common_length(whole, context)
            if not first:
                whole, first = np.insert(whole, 0, self.tokenizer.eod_id), 1
            spans.append(Span(whole, first) if first < len(whole) else None)
        return spans

    def log_likelihoods(self, spans: Sequence[Span | None]) -> list[tuple[float, bool]]:
        """Sum of the scored ids' log-probabilities, and whether each of them was the likeliest; (0, True) for None."""
        scores = iter(self.score([self._truncated(span) for span in spans if span is not None]))
        results = []
        for span in spans:
            if span is None:
                results.append((0.0, True))
            else:
                found = next(scores)
                total = float(found.log_probabilities.sum(dtype=np.float64))
                results.append((total, bool(found.greedy.all())))
        return results

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """Log-likelihood of whole texts.

        A text longer than `max_length` is cut into pieces of that many ids; each but the first begins with the last id
        of the piece before, so that every id is scored once.
        """
        pieces = [self._pieces(ids) for ids in self.encode(texts)]
        scores = self.score([piece for text in pieces for piece in text])
        sums = [float(found.log_probabilities.sum(dtype=np.float64)) for found in scores]
        borders = [0, *accumulate(map(len, pieces))]
        return [sum(sums[start:stop]) for start, stop in pairwise(borders)]

    def score(self, spans: Sequence[Span]) -> list[SpanScores]:
        """`score_spans` with progress in the log."""
        return score_spans(self.model, spans, self.batch_tokens, Progress(self.task))

    def _truncated(self, span: Span) -> Span:
        # The last id is predicted and never read.
        limit = len(span.ids) if self.max_length is None else self.max_length + 1
        self.truncation.count(len(span.ids), min(len(span.ids), limit))
        surplus = max(len(span.ids) - limit, 0)
        return Span(span.ids[surplus:], max(span.first - surplus, 1))

    def _pieces(self, ids: np.ndarray) -> list[Span]:
        size = self.max_length or max(len(ids), 1)
        read = np.insert(ids, 0, self.tokenizer.eod_id)
        return [Span(read[start : start + size + 1], 1) for start in range(0, len(ids), size)]


def _spaces_moved(context: str, continuation: str) -> tuple[str, str]:
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation


def _common_length(whole: np.ndarray, context: np.ndarray) -> int:
    """Ids at the beginning in which both agree."""
    length = min(len(whole), len(context))
    different = np.flatnonzero(whole[:length] != context[:length])
    return int(different[0]) if len(different) else length
