"""Log-probabilities of given ids: spans of any lengths, packed into rows, logits only where they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor

from megatron_palimpsa.model.build import packed_sequence

_LOGIT_TOKENS = 2048
"""Whose logits exist at a time: of a long row they would be the largest tensors there are."""


@dataclass(frozen=True, eq=False)
class Span:
    """Ids [n] of which those from `first` on are scored, each given all that stand before it."""

    ids: np.ndarray
    first: int

    def __post_init__(self) -> None:
        if not 1 <= self.first < len(self.ids):
            raise ValueError(f"of {len(self.ids)} ids those from {self.first} on have no context or are none")


@dataclass(frozen=True, eq=False)
class SpanScores:
    """Of the n scored ids of a span."""

    log_probabilities: np.ndarray
    """[n] float32, natural logarithm."""
    greedy: np.ndarray
    """[n] bool: no id of the vocabulary is likelier."""


def score_spans(
    model: HybridModel,
    spans: Sequence[Span],
    batch_tokens: int,
    on_tokens: Callable[[int, int], None] = lambda done, total: None,
) -> list[SpanScores]:
    """Score spans, each as a document of its own.

    Spans with the same ids but for the last are computed once: the answers of a multiple-choice question that have one
    id each share its context.

    Args:
        model: in evaluation mode, whole.
        batch_tokens: of a row, about; a longer span has a row to itself.
        on_tokens: called after each row with the tokens computed so far, and how many there are.
    """
    contexts: dict[bytes, list[int]] = {}
    for number, span in enumerate(spans):
        contexts.setdefault(span.ids[:-1].astype(np.int64).tobytes(), []).append(number)
    # The longest first: what does not fit into memory shows at once.
    groups = sorted(contexts.values(), key=lambda group: -len(spans[group[0]].ids))
    total = sum(len(spans[group[0]].ids) - 1 for group in groups)
    scores: dict[int, SpanScores] = {}
    done = 0
    for row in _rows(groups, spans, batch_tokens):
        scores.update(_score_row(model, row, spans))
        done += sum(len(spans[group[0]].ids) - 1 for group in row)
        on_tokens(done, total)
    return [scores[number] for number in range(len(spans))]


def _rows(groups: list[list[int]], spans: Sequence[Span], batch_tokens: int) -> Iterator[list[list[int]]]:
    row: list[list[int]] = []
    tokens = 0
    for group in groups:
        length = len(spans[group[0]].ids) - 1
        if row and tokens + length > batch_tokens:
            yield row
            row, tokens = [], 0
        row.append(group)
        tokens += length
    if row:
        yield row


def _score_row(model: HybridModel, row: list[list[int]], spans: Sequence[Span]) -> dict[int, SpanScores]:
    contexts = [spans[group[0]].ids[:-1] for group in row]
    starts = [0, *accumulate(map(len, contexts))]
    numbers = [number for group in row for number in group]
    places = [
        np.arange(start + spans[number].first - 1, start + len(spans[number].ids) - 1)
        for start, group in zip(starts, row, strict=False)
        for number in group
    ]
    targets = np.concatenate([spans[number].ids[spans[number].first :] for number in numbers]).astype(np.int64)
    log_probabilities, greedy = _at(model, np.concatenate(contexts), starts, np.concatenate(places), targets)
    borders = list(accumulate(map(len, places)))[:-1]
    parts = zip(np.split(log_probabilities, borders), np.split(greedy, borders), strict=True)
    return {number: SpanScores(*part) for number, part in zip(numbers, parts, strict=True)}


@torch.no_grad()
def _at(
    model: HybridModel, ids: np.ndarray, starts: list[int], places: np.ndarray, targets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Of documents of ids [T] that begin at `starts`: log-probability [N] of `targets` [N] behind `places` [N]."""
    device = next(model.parameters()).device
    tokens = torch.from_numpy(ids.astype(np.int64))[None].to(device)
    hidden, logits_of = _hidden_states(model, tokens, starts)
    found: list[Tensor] = []
    greedy: list[Tensor] = []
    vocabulary = model.model_config.vocab_size
    for start in range(0, len(places), _LOGIT_TOKENS):
        part = slice(start, start + _LOGIT_TOKENS)
        logits = logits_of(hidden[torch.from_numpy(places[part]).to(device)]).float()
        wanted = torch.from_numpy(targets[part]).to(device)[:, None]
        chosen = logits.gather(-1, wanted)[:, 0]
        # As the training loss: over every row of the output layer, those behind the vocabulary's end too.
        found.append(chosen - logits.logsumexp(-1))
        greedy.append(chosen >= logits[:, :vocabulary].amax(-1))
    return torch.cat(found).cpu().numpy(), torch.cat(greedy).cpu().numpy()


def _hidden_states(model: HybridModel, tokens: Tensor, starts: list[int]) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """What the output layer gets [T, h], and the output layer itself, [N, h] -> logits [N, V]."""
    layer = model.output_layer
    settings: dict[str, Any] = {}

    def pass_on(hidden: Tensor, **options: Any) -> tuple[Tensor, None]:
        settings.update(options)
        return hidden, None

    offsets = torch.tensor(starts, dtype=torch.int32, device=tokens.device)
    layer.forward = pass_on
    try:
        hidden = model(
            input_ids=tokens,
            position_ids=None,
            attention_mask=None,
            packed_seq_params=packed_sequence(offsets, offsets=tuple(starts)),
        )
    finally:
        del layer.forward
    return hidden[0], lambda states: layer(states[:, None], **settings)[0][:, 0]
