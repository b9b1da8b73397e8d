"""What is kept of a context, and how much memory it takes to read it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.live_memory import LiveMemory
from helpers.models import randomise
from helpers.stages import tiny_stage

from megatron_palimpsa.model import build_model
from megatron_palimpsa.model.decoding import PREFILL_TOKENS, StateBytes, prefill
from megatron_palimpsa.model.generation import Meter, stream

KIBI = 1024


def model_of(pattern):
    model = build_model(tiny_stage(model={"pattern": pattern})).eval()
    randomise(model, scale=0.1)
    return model


def random_ids(count):
    return np.random.default_rng(0).integers(0, 61, count).astype(np.int32)


def taken(model, tokens) -> tuple[int, StateBytes]:
    """Most bytes of tensors alive at once while a prompt of so many tokens is continued, and those kept."""
    meter = Meter()
    with LiveMemory() as memory:
        for _ in stream(model, [random_ids(tokens)], max_new_tokens=3, meter=meter):
            pass
    return memory.peak, meter.state


def test_memory_is_the_same_at_any_length_of_the_context():
    model = model_of("PM")
    assert PREFILL_TOKENS == KIBI
    (first, state), *longer = [taken(model, tokens) for tokens in (KIBI, 4 * KIBI, 8 * KIBI)]
    assert state.keys_and_values == 0 < state.importance < state.content
    assert [kept for _, kept in longer] == [state] * 2
    # The first chunk alone has no state to start from.
    assert first < longer[0][0] < 1.02 * first
    assert longer[0][0] == longer[1][0]


@pytest.mark.long
def test_memory_is_the_same_at_64k_tokens():
    model = model_of("PM")
    assert taken(model, 64 * KIBI) == taken(model, 4 * KIBI)


def test_only_keys_and_values_grow_with_the_context():
    model = model_of("P*")
    states = [taken(model, tokens)[1] for tokens in (300, 600)]
    # Keys and values of 2 groups with 8 channels, fp32.
    assert states[1].keys_and_values - states[0].keys_and_values == 300 * 2 * 2 * 8 * 4
    assert states[0].total - states[0].keys_and_values == states[1].total - states[1].keys_and_values


def test_a_prompts_states_do_not_depend_on_the_others():
    model = model_of("PM*")
    prompts = [random_ids(5), random_ids(11)[::-1].copy()]
    logits, cache = prefill(model, prompts, room=2)
    for row, prompt in enumerate(prompts):
        alone_logits, alone = prefill(model, [prompt], room=2)
        assert torch.equal(logits[row : row + 1], alone_logits)
        for layer in (1, 2):
            kept, expected = (c.context.key_value_memory_dict[layer] for c in (cache, alone))
            for name in ("conv_x", "conv_bc"):
                assert torch.equal(getattr(kept, name)[row : row + 1], getattr(expected, name))
            assert all(torch.equal(a[row : row + 1], b) for a, b in zip(kept.memory, expected.memory, strict=True))
        for kept, expected in zip(*(c.context.key_value_memory_dict[3] for c in (cache, alone)), strict=True):
            # The rows end together, with room for two more behind.
            assert torch.equal(kept[11 - len(prompt) : 11, row], expected[: len(prompt), 0])
            assert not kept[: 11 - len(prompt), row].any()
