"""Prompts continued as text, several at once, up to a stop string or the document's end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.evaluation.scorer import Progress, Scorer
from megatron_palimpsa.inference.detokenizer import Detokenizer
from megatron_palimpsa.model.generation import stream
from megatron_palimpsa.model.sampling import Sampling

_ROWS = 16
"""Prompts at once; each holds its layers' states in memory."""


def require_states(scorer: Scorer, task: str) -> None:
    """Raises ConfigError where the model has layers that cannot go on from a prompt."""
    if "G" in scorer.model.model_config.layers:
        raise ConfigError(
            f"task {task}: continues texts, and Gated DeltaNet layers (G) keep no states here; tasks of likelihoods "
            f"(`paper`, longbench_v2_choice) measure such a model"
        )


def continue_prompts(
    scorer: Scorer,
    prompts: Sequence[np.ndarray],
    max_new_tokens: int,
    stops: Sequence[str] = (),
    sampling: Sampling | None = None,
) -> list[str]:
    """What follows each prompt [T] of ids, without it, up to the first of `stops` that comes up."""
    # The longest first, those of about one length together.
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    found = [""] * len(prompts)
    progress = Progress(scorer.task)
    done, total = 0, sum(map(len, prompts))
    for start in range(0, len(order), _ROWS):
        numbers = order[start : start + _ROWS]
        chosen = [prompts[number] for number in numbers]
        texts = _continue(scorer, chosen, max_new_tokens, stops, sampling, first_row=start)
        for number, text in zip(numbers, texts, strict=True):
            found[number] = text
        done += sum(map(len, chosen))
        progress(done, total)
    return found


def _continue(
    scorer: Scorer,
    prompts: Sequence[np.ndarray],
    max_new_tokens: int,
    stops: Sequence[str],
    sampling: Sampling | None,
    first_row: int,
) -> list[str]:
    tokenizer = scorer.tokenizer
    rows = [_Row(Detokenizer(tokenizer, prompt), stops) for prompt in prompts]
    steps = stream(
        scorer.model,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_ids=(tokenizer.eod_id,),
        vocab_size=tokenizer.vocab_size,
        first_row=first_row,
    )
    for tokens in steps:
        for row, token in zip(rows, tokens, strict=True):
            if token is not None:
                row.add(token)
        if all(row.stopped for row in rows):
            break
    return [row.finish() for row in rows]


class _Row:
    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._detokenizer, self._stops = detokenizer, [stop for stop in stops if stop]
        self._text = ""
        self.stopped = False

    def add(self, token: int) -> None:
        if not self.stopped:
            self._take(self._detokenizer.add(token))

    def finish(self) -> str:
        if not self.stopped:
            self._take(self._detokenizer.rest())
        return self._text

    def _take(self, piece: str) -> None:
        self._text += piece
        places = [place for stop in self._stops if (place := self._text.find(stop)) >= 0]
        if places:
            self._text, self.stopped = self._text[: min(places)], True
