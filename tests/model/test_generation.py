"""Decoding from cached states, and what is drawn."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers.models import randomise
from helpers.reference_model import relative_error
from helpers.stages import random_batch, tiny_stage
from megatron.core.inference.contexts import StaticInferenceContext

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.model import build_model
from megatron_palimpsa.model.generation import choose, generate


def sharp_model(**model_settings):
    """Weights larger than the initial ones, so that the logits differ clearly."""
    config = tiny_stage(model=model_settings)
    model = build_model(config)
    randomise(model, scale=0.3)
    return config, model.eval()


def logits_of(model, tokens, context=None):
    with torch.no_grad():
        return model(input_ids=tokens, position_ids=None, attention_mask=None, inference_context=context)


@pytest.mark.parametrize("pattern", ["PM*-", "P", "M", "*"])
@pytest.mark.parametrize("cuts", [[1] * 20, [11, *[1] * 9], [1, 12, 7]])
def test_decoding_in_pieces_equals_the_whole_forward(pattern, cuts):
    config, model = sharp_model(pattern=pattern, ngroups=2)
    tokens = random_batch(config, seed=4).tokens[:, :20]
    expected = logits_of(model, tokens)
    context = StaticInferenceContext(max_batch_size=1, max_sequence_length=20)
    pieces = []
    for piece in tokens.split(cuts, dim=1):
        pieces.append(logits_of(model, piece, context))
        context.increment_sequence_len_offset(piece.shape[1])
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, atol=1e-5, rtol=1e-5)
    assert expected.std() > 0.5


def test_a_bf16_model_decodes_as_it_computes_the_whole():
    config = tiny_stage(model={"pattern": "PM*-"}, train={"precision": "bf16"})
    model = build_model(config).eval()
    randomise(model, scale=0.1)
    tokens = random_batch(config, seed=4).tokens[:, :20]
    expected = logits_of(model, tokens)
    context = StaticInferenceContext(max_batch_size=1, max_sequence_length=20)
    pieces = []
    for piece in tokens.split(1, dim=1):
        pieces.append(logits_of(model, piece, context))
        context.increment_sequence_len_offset(1)
    assert relative_error(torch.cat(pieces, dim=1), expected) < 1e-2
    memory = context.key_value_memory_dict[1].memory
    assert [state.dtype for state in memory] == [torch.float32, torch.float32]


def test_greedy_generation_takes_the_most_probable_id_each_time():
    config, model = sharp_model(pattern="PM*-")
    prompt = [3, 1, 4, 1, 5]
    generated = generate(model, prompt, max_new_tokens=12)
    ids = list(prompt)
    for _ in range(12):
        ids.append(int(logits_of(model, torch.tensor([ids]))[0, -1, : config.model.vocab_size].argmax()))
    assert generated == ids[5:]
    assert generate(model, prompt, max_new_tokens=12) == generated


def test_generation_ends_at_a_stop_id():
    _, model = sharp_model(pattern="PM*-")
    generated = generate(model, [3, 1, 4], max_new_tokens=12)
    stop = generated[4]
    assert generate(model, [3, 1, 4], max_new_tokens=12, stop_ids=[stop]) == generated[: generated.index(stop)]


def test_sampling_depends_on_the_seed_alone_and_never_leaves_the_vocabulary():
    _, model = sharp_model(pattern="P", vocab_size=50, vocab_multiple=64)
    with torch.no_grad():
        # Rows of the padding would win, were they not left out.
        model.embedding.word_embeddings.weight[50:] *= 100
    settings = {"max_new_tokens": 60, "temperature": 2.0}
    draws = [generate(model, [1, 2], seed=seed, **settings) for seed in (7, 7, 8)]
    assert draws[0] == draws[1] != draws[2]
    assert max(max(draw) for draw in draws) < 50
    assert max(generate(model, [1, 2], max_new_tokens=60)) < 50


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "allowed"),
    [
        (1.0, 0, 1.0, {0, 1, 2, 3}),
        (1.0, 2, 1.0, {1, 3}),
        (1.0, 0, 0.6, {1, 3}),
        (1.0, 0, 0.4, {1}),
        (1e-4, 0, 1.0, {1}),
        (5e-324, 0, 1.0, {1}),
        (1.0, 0, 1e-300, {1}),
    ],
)
def test_choice_is_limited_to_the_most_probable(temperature, top_k, top_p, allowed):
    logits = torch.tensor([0.1, 0.5, 0.05, 0.35]).log()
    generator = torch.Generator().manual_seed(0)
    drawn = {choose(logits, temperature, top_k, top_p, generator) for _ in range(300)}
    assert drawn == allowed


def test_a_model_in_training_with_recomputation_generates_the_same_and_stays_in_training():
    config, model = sharp_model(pattern="PM*-")
    expected = generate(model, [5, 6], max_new_tokens=8)
    training = build_model(dataclasses.replace(config, train=dataclasses.replace(config.train, recompute="full")))
    training.load_state_dict(model.state_dict())
    assert generate(training.train(), [5, 6], max_new_tokens=8) == expected
    assert training.training
    assert training.decoder.layers[0].training


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "prompt is empty"),
        ([61], {}, "vocabulary of 61"),
        ([-1], {}, "vocabulary of 61"),
        ([1], {"temperature": -1.0}, "temperature=-1.0"),
        ([1], {"temperature": float("nan")}, "temperature=nan"),
        ([1], {"top_p": float("nan")}, "top_p=nan"),
        ([1], {"top_k": -1}, "top_k=-1"),
        ([1], {"top_p": 0.0}, "top_p=0.0"),
        ([1], {"seed": 2**64}, "seed of the sampling"),
        ([40], {"vocab_size": 40}, "vocabulary of 40"),
    ],
)
def test_wrong_requests_are_refused(prompt, settings, message):
    _, model = sharp_model(pattern="P")
    with pytest.raises(ConfigError, match=message):
        generate(model, prompt, max_new_tokens=1, **settings)


def test_layouts_that_cannot_generate_are_refused():
    _, model = sharp_model(pattern="P")
    model.config.sequence_parallel = True
    with pytest.raises(ConfigError, match="sequence_parallel=false"):
        generate(model, [1], max_new_tokens=1)
    part = build_model(tiny_stage(model={"pattern": "P"}), post_process=False)
    with pytest.raises(ConfigError, match="pp=1"):
        generate(part, [1], max_new_tokens=1)
