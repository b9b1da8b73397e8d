"""Greedy and sampled generation, one token at a time from cached states."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator, Sequence

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.utils import InferenceMode
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor, nn

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.model.naming import unwrap


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_ids: Collection[int] = (),
    vocab_size: int | None = None,
) -> list[int]:
    """Continue a prompt.

    Under tensor parallelism every rank calls it with the same arguments and gets the same ids.

    Args:
        model: holds all layers (no pipeline parallelism), without sequence parallelism.
        prompt_ids: at least one id below the model's `vocab_size`.
        max_new_tokens: generate at most as many.
        temperature: divides the logits before sampling; 0 takes the most probable id.
        top_k: sample among the k most probable ids only; 0 does not restrict.
        top_p: sample among the most probable ids that together reach this probability only.
        seed: of the sampling.
        stop_ids: generation ends when one of them is drawn, and it is not part of the result.
        vocab_size: choose among the ids below it; None is the model's, which may have more than the tokenizer.

    Returns:
        The new ids, without the prompt.

    Raises:
        ConfigError: the prompt is empty or not of this vocabulary, a sampling setting is out of its range, or the
            model's layout is not one to generate under.
    """
    language_model = unwrap(model)
    vocab_size = min(language_model.model_config.vocab_size, vocab_size or sys.maxsize)
    _check(language_model, prompt_ids, vocab_size, temperature, top_k, top_p, seed)
    device = next(language_model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    context = StaticInferenceContext(max_batch_size=1, max_sequence_length=len(prompt_ids) + max_new_tokens)
    tokens = list(prompt_ids)
    generated: list[int] = []
    with _evaluating(language_model), InferenceMode.active():
        while len(generated) < max_new_tokens:
            logits = language_model(
                input_ids=torch.tensor([tokens], device=device),
                position_ids=None,
                attention_mask=None,
                inference_context=context,
                runtime_gather_output=True,
            )
            context.increment_sequence_len_offset(len(tokens))
            token = choose(logits[0, -1, :vocab_size].float().cpu(), temperature, top_k, top_p, generator)
            if token in stop_ids:
                break
            generated.append(token)
            tokens = [token]
    return generated


def choose(logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> int:
    """Draw an id from logits [V] fp32 on the CPU; see `generate` for the settings."""
    if temperature == 0.0:
        return int(logits.argmax())
    logits, ids = logits.sort(descending=True, stable=True)
    if top_k:
        logits, ids = logits[:top_k], ids[:top_k]
    # In double precision and below zero, where the smallest temperature overflows to -inf, which is a probability of 0.
    probabilities = ((logits.double() - logits[0]) / temperature).softmax(-1).float()
    # The id that crosses top_p still belongs to the set, so that it is never empty.
    before = probabilities.cumsum(-1) - probabilities
    kept = probabilities.where((before < top_p) | (before <= 0), 0.0)
    return int(ids[torch.multinomial(kept, 1, generator=generator)])


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    # In training mode with recomputation Megatron's stack drops the inference context.
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _check(
    model: HybridModel,
    prompt_ids: Sequence[int],
    vocab_size: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
) -> None:
    if not (model.pre_process and model.post_process):
        raise ConfigError("generation needs all layers in one process: load the checkpoint with parallel.pp=1")
    if model.config.sequence_parallel:
        raise ConfigError("generation goes token by token: load the checkpoint with parallel.sequence_parallel=false")
    if not prompt_ids:
        raise ConfigError("the prompt is empty")
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab_size:
        raise ConfigError(f"the prompt holds ids outside of the model's vocabulary of {vocab_size}")
    # Not "temperature < 0": it would let NaN through.
    if not (temperature >= 0 and top_k >= 0 and 0 < top_p <= 1):
        raise ConfigError(
            f"sampling needs temperature >= 0, top_k >= 0 and 0 < top_p <= 1, "
            f"not temperature={temperature}, top_k={top_k}, top_p={top_p}"
        )
    if not 0 <= seed < 2**64:
        raise ConfigError(f"the seed of the sampling must lie in 0 to 2**64 - 1, not {seed}")
