"""The whole model: gradients, documents, padding, precision, marks, patterns."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers import reference_model
from helpers.models import randomise
from helpers.stages import random_batch, tiny_stage

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.model import build_model, forward_loss, run_layers
from megatron_palimpsa.model.naming import global_parameters
from megatron_palimpsa.training.batch import Batch

FP32_PARAMETERS = {"A_log", "D", "dt_bias", "b_scale", "prior_log"}


@pytest.mark.parametrize(
    "geometry",
    [
        {"pattern": "P", "train_prior": True},
        {"pattern": "P", "ngroups": 2, "norm_groups": 1, "tie_embeddings": False},
        {"pattern": "MP", "ngroups": 4, "norm_groups": 2, "d_conv": 3},
        {"pattern": "Q-", "train_prior": True, "headdim": 16},
        {"pattern": "*-*-", "rope_theta": 100.0},
        {"pattern": "LQ", "d_state": 6, "d_conv": 3, "tie_embeddings": False},
    ],
)
def test_losses_and_every_gradient_equal_a_float64_model_written_token_by_token(geometry):
    config = tiny_stage(model={"hidden_size": 16, **geometry})
    model = build_model(config)
    randomise(model)
    batch = random_batch(config, seed=3, padding=2)
    inside = int(batch.cu_seqlens[-1])

    weights = {
        name: parameter.detach().double().requires_grad_(parameter.requires_grad)
        for name, parameter in global_parameters(model)
    }
    expected = reference_model.losses(weights, config.model, batch.tokens, batch.labels, batch.cu_seqlens)
    weighted = torch.linspace(0.5, 1.5, inside, dtype=torch.float64)
    (expected * weighted).sum().backward()

    actual = forward_loss(model, batch)[0, :inside]
    (actual * weighted.float()).sum().backward()
    assert reference_model.relative_error(actual.detach(), expected.detach()) < 1e-6
    errors = {
        name: reference_model.relative_error(parameter.grad, weights[name].grad)
        for name, parameter in global_parameters(model)
        if parameter.requires_grad
    }
    assert max(errors.values()) < 1e-5, errors
    assert ("decoder.layers.0.mixer.prior_log" in errors) == config.model.train_prior


def test_hidden_states_without_logits_are_those_of_the_losses():
    config = tiny_stage()
    model = build_model(config)
    randomise(model)
    batch = random_batch(config, seed=4, padding=2)
    with torch.no_grad():
        logits = run_layers(model, batch)[:, 0] @ model.embedding.word_embeddings.weight.T
        expected = forward_loss(model, batch)
    losses = torch.nn.functional.cross_entropy(logits, batch.labels[0], reduction="none")
    torch.testing.assert_close(losses, expected[0], rtol=1e-5, atol=1e-5)


def two_documents(config, last_token_of_first: int) -> Batch:
    """Documents of 13 and 11 tokens in a row of 24; losses of the second only."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(config.model.vocab_size, (1, 24), generator=generator)
    tokens[0, 12] = last_token_of_first
    labels = torch.randint(config.model.vocab_size, (1, 24), generator=generator)
    return Batch(tokens, labels, torch.ones(1, 24), torch.tensor([0, 13, 24], dtype=torch.int32))


@pytest.mark.parametrize("pattern", ["MP", "*-", "PM*-", "QL"])
def test_a_document_does_not_see_the_one_before(pattern):
    config = tiny_stage(model={"pattern": pattern})
    results = []
    for token in (1, 2):
        model = build_model(config)
        randomise(model)
        losses = forward_loss(model, two_documents(config, token))
        losses[0, 13:].sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        results.append((losses.detach(), gradients))
    (first, first_gradients), (second, second_gradients) = results
    assert not torch.equal(first[0, 12], second[0, 12])
    assert torch.equal(first[0, 13:], second[0, 13:])
    for name, gradient in first_gradients.items():
        assert torch.equal(gradient, second_gradients[name]), name


@pytest.mark.parametrize("pattern", ["P", "M", "Q", "*", "PM*-"])
def test_padding_changes_nothing(pattern):
    config = tiny_stage(model={"pattern": pattern})
    model = build_model(config)
    randomise(model)
    batch = random_batch(config, seed=1, padding=7)
    other = dataclasses.replace(batch, tokens=batch.tokens.clone())
    other.tokens[0, -7:] = (other.tokens[0, -7:] + 1) % config.model.vocab_size
    results = []
    for one in (batch, other):
        model.zero_grad()
        losses = forward_loss(model, one)[0, :-7]
        losses.sum().backward()
        results.append([losses.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("fp32_residual", [True, False])
def test_a_bf16_model_keeps_fp32_parameters_and_its_residual(fp32_residual):
    settings = {"pattern": "MP*-PQ", "fp32_residual": fp32_residual}
    config = tiny_stage(model=settings, train={"precision": "bf16"})
    model = build_model(config)
    for name, parameter in model.named_parameters():
        is_fp32 = name.rsplit(".", 1)[-1] in FP32_PARAMETERS
        assert parameter.dtype == (torch.float32 if is_fp32 else torch.bfloat16), name
        assert getattr(parameter, "keep_fp32", False) == is_fp32, name
    stream = []
    for layer in model.decoder.layers:
        layer.register_forward_hook(
            lambda module, inputs, output: stream.append(output[0] if isinstance(output, tuple) else output)
        )
    losses = forward_loss(model, random_batch(config, seed=0))
    assert losses.dtype == torch.float32
    assert {hidden.dtype for hidden in stream} == {torch.float32 if fp32_residual else torch.bfloat16}
    losses.sum().backward()
    assert all(p.grad.dtype == p.dtype and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)

    exact = forward_loss(build_model(tiny_stage(model=settings)), random_batch(config, seed=0))
    assert reference_model.relative_error(losses.detach(), exact.detach()) < 5e-3


def test_no_weight_decay_on_vectors():
    model = build_model(tiny_stage(model={"pattern": "MP*-Q"}))
    for name, parameter in model.named_parameters():
        is_vector = parameter.dim() == 1
        assert getattr(parameter, "no_weight_decay", False) == is_vector, name


def test_recomputation_changes_no_gradient():
    results = []
    for recompute in ("none", "full"):
        config = tiny_stage(train={"recompute": recompute})
        model = build_model(config)
        forward_loss(model, random_batch(config, seed=2)).sum().backward()
        results.append([p.grad for p in model.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_kernels_that_are_not_installed_are_wrong_input(monkeypatch):
    monkeypatch.setenv("PALIMPSA_KERNELS", "mamba_ssm")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="PALIMPSA_KERNELS is 'mamba_ssm', but mamba_ssm is not installed"):
        build_model(tiny_stage())
