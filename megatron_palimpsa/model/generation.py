"""Greedy and sampled generation of one prompt or of several at once, from cached states."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch.distributed as dist
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor, nn

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.model.decoding import StateBytes, decode, prefill, state_bytes
from megatron_palimpsa.model.naming import unwrap
from megatron_palimpsa.model.sampling import Draws, Sampling, choose

Prompt = Sequence[int] | np.ndarray


@dataclass
class Phase:
    """Tokens that went through the model and the seconds that they took."""

    tokens: int = 0
    seconds: float = 0.0

    @contextlib.contextmanager
    def add(self, tokens: int) -> Iterator[None]:
        """Count so many tokens, and the time within."""
        start = time.perf_counter()
        yield
        self.tokens += tokens
        self.seconds += time.perf_counter() - start


@dataclass
class Meter:
    """What generation took; several generations may share one, which adds up."""

    prefill: Phase = field(default_factory=Phase)
    """The prompts, until the first new id of each is known."""
    decode: Phase = field(default_factory=Phase)
    """The new ids but each prompt's first."""
    state: StateBytes = field(default_factory=StateBytes)
    """Of the last batch."""
    on_prompt_tokens: Callable[[int, int], None] | None = None
    """Called after each chunk of a batch's prompts with the tokens read so far, and how many there are."""


def generate(
    model: nn.Module,
    prompt_ids: Prompt,
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: Collection[int] = (),
    vocab_size: int | None = None,
) -> list[int]:
    """The continuation of one prompt, without it; see `stream`."""
    steps = stream(
        model,
        [prompt_ids],
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_ids=stop_ids,
        vocab_size=vocab_size,
    )
    return [token for (token,) in steps if token is not None]


def stream(
    model: nn.Module,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: Collection[int] = (),
    vocab_size: int | None = None,
    first_row: int = 0,
    meter: Meter | None = None,
) -> Iterator[list[int | None]]:
    """Continue several prompts, one id of each at a time.

    Under tensor parallelism every rank calls it with the same arguments and gets the same ids.

    Args:
        model: holds all layers (no pipeline parallelism), without sequence parallelism.
        prompts: each at least one id below the vocabulary's size; their lengths may differ.
        max_new_tokens: of each prompt at most as many.
        sampling: None takes the most probable ids.
        stop_ids: a prompt's continuation ends when one of them is drawn, and it is not part of the result.
        vocab_size: choose among the ids below it; None is the model's, which may have more than the tokenizer.
        first_row: number of the first prompt, where a batch is part of more: draws depend on the seed and this number.
        meter: adds up tokens and seconds.

    Yields:
        The next id of each prompt; None for those that have ended.

    Raises:
        ConfigError: a prompt is empty or not of this vocabulary, or the model's layout is not one to generate under.
    """
    language_model = unwrap(model)
    sampling, meter = sampling or Sampling(), meter or Meter()
    vocab_size = min(language_model.model_config.vocab_size, vocab_size or sys.maxsize)
    _check_layout(language_model)
    rows = [_checked(prompt, vocab_size) for prompt in prompts]
    draws = Draws(sampling.seed, range(first_row, first_row + len(rows)))

    def draw(logits: Tensor) -> Tensor:
        return _agreed(choose(logits[:, :vocab_size], sampling, draws), language_model)

    with _evaluating(language_model):
        with meter.prefill.add(sum(map(len, rows))):
            logits, cache = prefill(language_model, rows, max_new_tokens, meter.on_prompt_tokens)
            ids = draw(logits)
            drawn = ids.tolist()
        meter.state = state_bytes(cache)
        running = [True] * len(rows)
        for left in reversed(range(max_new_tokens)):
            running = [goes_on and token not in stop_ids for goes_on, token in zip(running, drawn, strict=True)]
            if not any(running):
                return
            yield [token if goes_on else None for goes_on, token in zip(running, drawn, strict=True)]
            if left:
                with meter.decode.add(sum(running)):
                    ids = draw(decode(language_model, cache, ids))
                    drawn = ids.tolist()


def _agreed(ids: Tensor, model: HybridModel) -> Tensor:
    """The first tensor-parallel rank's ids: sums of probabilities may be rounded differently elsewhere."""
    group = model.pg_collection.tp
    if group.size() > 1:
        dist.broadcast(ids, dist.get_global_rank(group, 0), group=group)
    return ids


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    # In training mode with recomputation Megatron's stack drops the inference context.
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _check_layout(model: HybridModel) -> None:
    if not (model.pre_process and model.post_process):
        raise ConfigError("generation needs all layers in one process: load the checkpoint with parallel.pp=1")
    if model.config.sequence_parallel:
        raise ConfigError("generation goes token by token: load the checkpoint with parallel.sequence_parallel=false")


def _checked(prompt: Prompt, vocab_size: int) -> np.ndarray:
    ids = np.asarray(prompt)
    if not len(ids):
        raise ConfigError("the prompt is empty")
    if not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ConfigError(f"the prompt holds ids outside of the model's vocabulary of {vocab_size}")
    return ids
