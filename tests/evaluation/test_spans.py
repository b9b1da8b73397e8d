"""Scores of packed spans against logits of each text by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_palimpsa.evaluation.spans import Span, score_spans
from megatron_palimpsa.inference import Opened


@torch.no_grad()
def log_probabilities(it: Opened, ids: np.ndarray) -> Tensor:
    """Of every id behind every place [n, V], in float64; the text alone, not packed."""
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    logits = it.model(input_ids=tokens, position_ids=None, attention_mask=None)
    return logits[0].double().log_softmax(-1)


@pytest.fixture(scope="module")
def spans() -> list[Span]:
    draw = np.random.default_rng(3)
    lengths = [(9, 4), (2, 1), (40, 39), (40, 1), (17, 16), (23, 10)]
    made = [Span(draw.integers(320, size=length).astype(np.int32), first) for length, first in lengths]
    # Answers of one id each behind the same context.
    return [*made, *(Span(np.append(made[0].ids[:-1], answer), len(made[0].ids) - 1) for answer in (5, 6, 7))]


@pytest.mark.parametrize("batch_tokens", [1, 45, 10**6])
def test_scores_are_those_of_each_text_alone(it: Opened, spans: list[Span], batch_tokens: int) -> None:
    for span, found in zip(spans, score_spans(it.model, spans, batch_tokens), strict=True):
        expected = log_probabilities(it, span.ids)[span.first - 1 : -1]
        targets = torch.from_numpy(span.ids[span.first :].astype(np.int64))
        torch.testing.assert_close(
            torch.from_numpy(found.log_probabilities).double(),
            expected.gather(-1, targets[:, None])[:, 0],
            rtol=0,
            atol=1e-5,
        )
        assert found.greedy.tolist() == (expected.argmax(-1) == targets).tolist()


def test_the_likeliest_ids_are_greedy(it: Opened) -> None:
    ids = np.array([4, 8, 15])
    best = int(log_probabilities(it, ids)[-1].argmax())
    worst = int(log_probabilities(it, ids)[-1].argmin())
    scores = score_spans(it.model, [Span(np.append(ids, last), 3) for last in (best, worst)], 100)
    assert [found.greedy.tolist() for found in scores] == [[True], [False]]


def test_rows_hold_as_many_tokens_as_asked_for_and_shared_contexts_go_through_once(
    it: Opened, spans: list[Span]
) -> None:
    seen: list[tuple[int, int]] = []
    score_spans(it.model, spans, 45, lambda done, total: seen.append((done, total)))
    # 9, 2, 40, 40, 17 and 23 ids of which the last is not read; the answers of one id come with the first span.
    assert seen == [(39, 125), (78, 125), (116, 125), (125, 125)]


def test_a_span_without_context_or_without_what_is_scored_is_refused() -> None:
    for first in (0, 3):
        with pytest.raises(ValueError, match="have no context or are none"):
            Span(np.array([1, 2, 3]), first)
