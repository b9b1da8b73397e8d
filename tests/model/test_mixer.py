"""The mixers: their limits without importance, strong decay, decoding."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import reference_model
from helpers.models import randomise
from helpers.reference_model import relative_error
from helpers.stages import random_batch, tiny_stage
from megatron.core.inference.contexts import StaticInferenceContext
from palimpsa_kernels import mixing

from megatron_palimpsa.model import build_model, forward_loss
from megatron_palimpsa.model.naming import global_parameters
from megatron_palimpsa.model.weights import load_full_weights

NO_IMPORTANCE = -1e4
"""softplus of it is exactly 0 in fp32."""


@pytest.mark.parametrize(
    ("symbol", "plain", "geometry"),
    [
        ("P", "M", {}),
        ("P", "M", {"ngroups": 2}),
        ("P", "M", {"ngroups": 4, "norm_groups": 1}),
        ("Q", "L", {"headdim": 16}),
    ],
)
def test_with_beta_zero_and_prior_one_a_palimpsa_layer_is_the_one_without_importance(symbol, plain, geometry):
    palimpsa = build_model(tiny_stage(model={"pattern": 2 * symbol, **geometry}))
    randomise(palimpsa)
    with torch.no_grad():
        for layer in palimpsa.decoder.layers:
            layer.mixer.prior_log.zero_()
    plain_config = tiny_stage(model={"pattern": 2 * plain, **geometry})
    without_importance = build_model(plain_config)
    load_full_weights(without_importance, dict(global_parameters(palimpsa)))
    batch = random_batch(plain_config, seed=0, padding=3)
    with torch.no_grad():
        expected = forward_loss(without_importance, batch)
        with_importance = forward_loss(palimpsa, batch)
        for layer in palimpsa.decoder.layers:
            layer.mixer.b_scale.fill_(NO_IMPORTANCE)
        without = forward_loss(palimpsa, batch)
    assert relative_error(with_importance, expected) > 1e-3
    assert relative_error(without, expected) < 1e-6
    for name, parameter in global_parameters(without_importance):
        assert torch.equal(parameter, dict(global_parameters(palimpsa))[name])


def test_a_prior_of_two_is_not_the_mamba2_limit():
    config = tiny_stage(model={"pattern": "P"})
    model = build_model(config)
    randomise(model)
    batch = random_batch(config, seed=0)
    with torch.no_grad():
        model.decoder.layers[0].mixer.prior_log.zero_()
        model.decoder.layers[0].mixer.b_scale.fill_(NO_IMPORTANCE)
        one = forward_loss(model, batch)
        model.decoder.layers[0].mixer.prior_log.fill_(0.6931472)
        two = forward_loss(model, batch)
    assert relative_error(two, one) > 1e-3


def test_decoding_equals_a_float64_model_written_token_by_token():
    config = tiny_stage(model={"pattern": "Q-L", "headdim": 16})
    model = build_model(config).eval()
    randomise(model)
    batch = random_batch(config, seed=4)
    tokens, one_document = batch.tokens[:, :9], torch.tensor([0, 9])
    weights = {name: p.detach().double() for name, p in global_parameters(model)}
    expected = reference_model.losses(weights, config.model, tokens, batch.labels, one_document)
    context = StaticInferenceContext(max_batch_size=1, max_sequence_length=9)
    losses = []
    for place in range(9):
        with torch.no_grad():
            logits = model(tokens[:, place : place + 1], None, None, inference_context=context)[0]
        losses.append(F.cross_entropy(logits, batch.labels[0, place : place + 1]))
        context.increment_sequence_len_offset(1)
    assert relative_error(torch.stack(losses), expected) < 1e-6


@pytest.mark.parametrize(
    ("pattern", "scan"), [("P", "chunk_palimpsa"), ("M", "chunk_ssd"), ("Q", "chunk_palimpsa"), ("L", "chunk_ssd")]
)
def test_decay_stronger_than_the_scan_takes_is_limited(pattern, scan, monkeypatch):
    config = tiny_stage(model={"pattern": pattern})
    model = build_model(config)
    with torch.no_grad():
        model.decoder.layers[0].mixer.dt_bias.fill_(50.0)
        model.decoder.layers[0].mixer.A_log[:4] = 4.0
        model.decoder.layers[0].mixer.A_log[4:] = -4.0
    given = []
    original = getattr(mixing, scan)

    def spy(*arguments, **options):
        given.append(arguments[4 if scan == "chunk_palimpsa" else 3].detach())
        return original(*arguments, **options)

    monkeypatch.setattr(mixing, scan, spy)
    losses = forward_loss(model, random_batch(config, seed=0))
    losses.sum().backward()
    assert torch.equal(given[0][..., :4], torch.full((1, 32, 4), -100.0))
    torch.testing.assert_close(given[0][..., 4:], torch.full((1, 32, 4), -50 * math.exp(-4)), rtol=0.05, atol=0)
    assert losses.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
