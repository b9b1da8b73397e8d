"""Prompts through the model's cached states: each by itself and in chunks, then one token of all of them at a time.

Prompts of a batch differ in length. Each goes through alone, and what it leaves is put side by side: no padding is
computed, and what a prompt leaves depends neither on the others nor on their number. Only attention layers keep
something that grows, keys and values; those of all rows end at the same place, and what lies before a shorter row's
first token is masked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.utils import InferenceMode
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from megatron_palimpsa.model.mixer_parts import MixerState

PREFILL_TOKENS = 1024
"""Of a prompt that go through the model at once: memory does not grow with the prompt beyond them."""

KeysAndValues = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Cache:
    """What is kept of B rows between two tokens."""

    context: StaticInferenceContext
    """Its `key_value_memory_dict` has, by 1-based layer number, a `MixerState` or an attention layer's keys and
    values, each [longest row, B, heads, channels]."""
    padding: Tensor | None
    """[B, 1, 1, longest row]: True before a row's first token; None where all rows are of one length."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of what is kept of all rows."""

    content: int = 0
    importance: int = 0
    convolution: int = 0
    keys_and_values: int = 0
    """Reserved for the prompts and all new tokens; the others do not depend on the length."""

    @property
    def total(self) -> int:
        return self.content + self.importance + self.convolution + self.keys_and_values


def prefill(
    model: HybridModel, prompts: Sequence[np.ndarray], room: int, on_tokens: Callable[[int, int], None] | None = None
) -> tuple[Tensor, Cache]:
    """Let the prompts through.

    Args:
        model: in evaluation mode, all layers, without sequence parallelism.
        prompts: ids [T] of B prompts, none empty.
        room: tokens that may follow.
        on_tokens: called after each chunk with the tokens read of all prompts, and how many they have.

    Returns:
        Logits of the token behind each prompt [B, V], and the states.
    """
    longest = max(map(len, prompts))
    attention = _empty_keys_and_values(model, len(prompts), longest + room)
    device = next(model.parameters()).device
    logits: list[Tensor] = []
    rows = []
    read, total = 0, sum(map(len, prompts))
    for row, prompt in enumerate(prompts):
        start = longest - len(prompt)
        context = StaticInferenceContext(max_batch_size=1, max_sequence_length=len(prompt) + room)
        context.key_value_memory_dict = {
            layer: (keys[start:, row : row + 1], values[start:, row : row + 1])
            for layer, (keys, values) in attention.items()
        }
        for part in range(0, len(prompt), PREFILL_TOKENS):
            tokens = torch.from_numpy(prompt[part : part + PREFILL_TOKENS].astype(np.int64))
            behind = _forward(model, tokens[None].to(device), context)
            read += len(tokens)
            if on_tokens is not None:
                on_tokens(read, total)
        logits.append(behind)
        rows.append(context.key_value_memory_dict)
    joined = StaticInferenceContext(max_batch_size=len(prompts), max_sequence_length=longest + room)
    joined.sequence_len_offset = longest
    mixers = [layer for layer in rows[0] if layer not in attention]
    joined.key_value_memory_dict = attention | {
        layer: MixerState.side_by_side([row.pop(layer) for row in rows]) for layer in mixers
    }
    return torch.cat(logits), Cache(joined, _padding(prompts, longest + room, device) if attention else None)


def decode(model: HybridModel, cache: Cache, ids: Tensor) -> Tensor:
    """One token of each row, ids [B] on the model's device -> logits of the next one [B, V]; `cache` moves on."""
    padding = cache.padding
    if padding is not None:
        padding = padding[..., : cache.context.sequence_len_offset + 1]
    return _forward(model, ids[:, None], cache.context, padding)


def state_bytes(cache: Cache) -> StateBytes:
    """The sizes of a cache."""
    sizes = {"content": 0, "importance": 0, "convolution": 0, "keys_and_values": 0}
    for state in cache.context.key_value_memory_dict.values():
        if isinstance(state, MixerState):
            sizes["convolution"] += state.conv_x.nbytes + state.conv_bc.nbytes
            for name, memory in zip(("content", "importance"), state.memory, strict=False):
                sizes[name] += memory.nbytes
        else:
            sizes["keys_and_values"] += sum(tensor.nbytes for tensor in state)
    return StateBytes(**sizes)


def _forward(
    model: HybridModel, tokens: Tensor, context: StaticInferenceContext, padding: Tensor | None = None
) -> Tensor:
    """[B, T] -> logits behind the last of them [B, V], whole on every tensor-parallel rank."""
    with torch.no_grad(), InferenceMode.active():
        logits = model(
            input_ids=tokens,
            position_ids=None,
            attention_mask=padding,
            inference_context=context,
            runtime_gather_output=True,
        )
    context.increment_sequence_len_offset(tokens.shape[1])
    return logits[:, -1]


def _empty_keys_and_values(model: HybridModel, batch: int, length: int) -> dict[int, KeysAndValues]:
    """By layer number; zero, because what a mask hides must still be finite."""
    weight = next(model.parameters())
    return {
        layer.layer_number: (
            weight.new_zeros(length, batch, layer.num_query_groups_per_partition, layer.key_hidden_size),
            weight.new_zeros(length, batch, layer.num_query_groups_per_partition, layer.val_hidden_size),
        )
        for layer in model.modules()
        if isinstance(layer, SelfAttention)
    }


def _padding(prompts: Sequence[np.ndarray], length: int, device: torch.device) -> Tensor | None:
    sizes = torch.tensor([len(prompt) for prompt in prompts])
    if bool((sizes == sizes[0]).all()):
        return None
    first = sizes.max() - sizes
    return (torch.arange(length) < first[:, None])[:, None, None].to(device)
