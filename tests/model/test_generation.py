"""Generation from cached states against whole forward passes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers.models import randomise
from helpers.reference_model import relative_error
from helpers.stages import random_batch, tiny_stage
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.utils import InferenceMode

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.model import build_model, decoding
from megatron_palimpsa.model.build import packed_sequence
from megatron_palimpsa.model.generation import Meter, generate, stream
from megatron_palimpsa.model.sampling import Sampling

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7], [2, 7, 1, 8], [60, 0, 60, 0, 60, 0, 60]]


def sharp_model(precision="fp32", **model_settings):
    """Weights larger than the initial ones, so that the logits differ clearly."""
    if "*" in model_settings["pattern"]:
        model_settings["rope_theta"] = 100.0
    config = tiny_stage(model=model_settings, train={"precision": precision})
    model = build_model(config)
    randomise(model, scale=0.3 if precision == "fp32" else 0.1)
    return config, model.eval()


def logits_of(model, tokens, context=None):
    with torch.no_grad():
        return model(input_ids=tokens, position_ids=None, attention_mask=None, inference_context=context)


def greedy_without_a_cache(model, prompt, count):
    """Each id of a whole forward pass, the one that training takes."""
    ids = list(prompt)
    for _ in range(count):
        packed = packed_sequence(torch.tensor([0, len(ids)], dtype=torch.int32))
        tokens = torch.tensor([ids])
        with torch.no_grad():
            logits = model(input_ids=tokens, position_ids=None, attention_mask=None, packed_seq_params=packed)
        ids.append(int(logits[0, -1, : model.model_config.vocab_size].argmax()))
    return ids[len(prompt) :]


def columns(steps):
    """What `stream` yields, by prompt."""
    return [[token for token in column if token is not None] for column in zip(*steps, strict=True)]


@pytest.fixture
def chunks_of_four(monkeypatch):
    """Prompts go through in chunks, of which the last may be shorter than the convolution's window."""
    monkeypatch.setattr(decoding, "PREFILL_TOKENS", 4)


@pytest.mark.parametrize("pattern", ["PM*-", "P", "M", "*", "Q-L"])
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
    config, model = sharp_model("bf16", pattern="PM*-")
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


@pytest.mark.parametrize("pattern", ["PM*-PM*-", "P-P", "MM", "*-*", "QL"])
@pytest.mark.usefixtures("chunks_of_four")
def test_cached_greedy_ids_are_those_of_whole_forward_passes_alone_and_in_a_batch(pattern):
    _, model = sharp_model(pattern=pattern, ngroups=2)
    expected = [greedy_without_a_cache(model, prompt, 8) for prompt in PROMPTS]
    assert [generate(model, prompt, max_new_tokens=8) for prompt in PROMPTS] == expected
    assert columns(stream(model, PROMPTS, max_new_tokens=8)) == expected
    # Neither one id forever nor the same ones for all.
    assert len({token for ids in expected for token in ids}) > 6


@pytest.mark.usefixtures("chunks_of_four")
def test_a_batch_of_a_bf16_model_equals_each_prompt_alone():
    _, model = sharp_model("bf16", pattern="PM*-")
    alone = [generate(model, prompt, max_new_tokens=8) for prompt in PROMPTS]
    assert columns(stream(model, PROMPTS, max_new_tokens=8)) == alone


def test_draws_of_a_prompt_do_not_depend_on_its_batch():
    _, model = sharp_model(pattern="PM*-")
    settings = {"max_new_tokens": 8, "sampling": Sampling(temperature=1.5, seed=7)}
    together = columns(stream(model, PROMPTS, **settings))
    apart = [
        *columns(stream(model, PROMPTS[:1], **settings)),
        *columns(stream(model, PROMPTS[1:], first_row=1, **settings)),
    ]
    assert together == apart
    other_seed = {**settings, "sampling": Sampling(temperature=1.5, seed=8)}
    assert columns(stream(model, PROMPTS, **other_seed)) != together


def test_each_prompt_ends_at_its_own_stop_id():
    _, model = sharp_model(pattern="PM*-")
    whole = [generate(model, prompt, max_new_tokens=8) for prompt in PROMPTS]
    stops = [whole[0][4], whole[2][0]]
    expected = []
    for ids in whole:
        end = next((place for place, token in enumerate(ids) if token in stops), len(ids))
        expected.append(ids[:end])
    assert expected[2] == []
    assert 0 < len(expected[0]) < 8
    steps = list(stream(model, PROMPTS, max_new_tokens=8, stop_ids=stops))
    assert columns(steps) == expected
    assert len(steps) == max(map(len, expected))
    # Whoever has ended stays so.
    for column, ids in zip(zip(*steps, strict=True), expected, strict=True):
        assert column[len(ids) :] == (None,) * (len(steps) - len(ids))


def test_ids_beyond_the_vocabulary_are_never_chosen():
    _, model = sharp_model(pattern="P", vocab_size=50, vocab_multiple=64)
    with torch.no_grad():
        # Rows of the padding would win, were they not left out.
        model.embedding.word_embeddings.weight[50:] *= 100
    assert max(generate(model, [1, 2], max_new_tokens=60, sampling=Sampling(temperature=2.0))) < 50
    assert max(generate(model, [1, 2], max_new_tokens=60)) < 50
    assert max(generate(model, [1, 2], max_new_tokens=60, vocab_size=20)) < 20


def test_meter_counts_tokens_of_both_phases_and_the_states_bytes():
    config, model = sharp_model(pattern="PM*-", ngroups=2)
    meter = Meter()
    read = []
    meter.on_prompt_tokens = lambda done, total: read.append((done, total))
    for _ in range(2):
        list(stream(model, [[1, 2, 3], [4] * 5], max_new_tokens=4, meter=meter))
    assert read == [(3, 8), (8, 8)] * 2
    assert (meter.prefill.tokens, meter.decode.tokens) == (16, 12)
    assert meter.prefill.seconds > 0 < meter.decode.seconds
    geometry = config.model
    one_state = geometry.nheads * geometry.headdim * geometry.d_state * 4
    assert (meter.state.content, meter.state.importance) == (2 * 2 * one_state, 2 * one_state)
    channels = geometry.nheads * geometry.headdim + 2 * geometry.ngroups * geometry.d_state
    assert meter.state.convolution == 2 * 2 * channels * (geometry.d_conv - 1) * 4
    # Two prompts, room for the longer one and all new ids, two groups of queries with 8 channels, fp32.
    assert meter.state.keys_and_values == 2 * 2 * (5 + 4) * 2 * 8 * 4
    assert meter.state.total == sum(vars(meter.state).values())


def test_a_model_in_training_with_recomputation_generates_the_same_and_stays_in_training():
    config, model = sharp_model(pattern="PM*-")
    expected = generate(model, [5, 6], max_new_tokens=8)
    training = build_model(dataclasses.replace(config, train=dataclasses.replace(config.train, recompute="full")))
    training.load_state_dict(model.state_dict())
    assert generate(training.train(), [5, 6], max_new_tokens=8) == expected
    assert training.training
    assert training.decoder.layers[0].training


def test_whoever_takes_the_ids_may_train_in_between():
    _, model = sharp_model(pattern="P")
    for _ in stream(model, [[1, 2]], max_new_tokens=2):
        assert torch.is_grad_enabled()
        assert not InferenceMode.is_active()


def test_wrong_requests_are_refused():
    _, model = sharp_model(pattern="P")
    for prompt, settings, message in (
        ([], {}, "prompt is empty"),
        ([61], {}, "vocabulary of 61"),
        ([-1], {}, "vocabulary of 61"),
        ([40], {"vocab_size": 40}, "vocabulary of 40"),
    ):
        with pytest.raises(ConfigError, match=message):
            generate(model, prompt, max_new_tokens=1, **settings)
        with pytest.raises(ConfigError, match=message):
            list(stream(model, [[1], prompt], max_new_tokens=1, **settings))


def test_layouts_that_cannot_generate_are_refused():
    _, model = sharp_model(pattern="P")
    model.config.sequence_parallel = True
    with pytest.raises(ConfigError, match="sequence_parallel=false"):
        generate(model, [1], max_new_tokens=1)
    part = build_model(tiny_stage(model={"pattern": "P"}), post_process=False)
    with pytest.raises(ConfigError, match="pp=1"):
        generate(part, [1], max_new_tokens=1)
