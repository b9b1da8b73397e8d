"""Memory windows and importance ratios against values computed from the layer's inputs."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers.models import randomise
from helpers.stages import random_batch, tiny_stage

from megatron_palimpsa.model import build_model, forward_loss, memory_statistics


def test_windows_and_ratios_of_a_layer_recomputed_from_its_input():
    config = tiny_stage(model={"pattern": "*MP"})
    model = build_model(config)
    randomise(model)
    batch = random_batch(config, seed=0, padding=5)
    inside, offsets = int(batch.cu_seqlens[-1]), batch.cu_seqlens.tolist()
    inputs = []
    mixer = model.decoder.layers[2].mixer
    handle = mixer.register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0][:inside, 0]))
    statistics = memory_statistics(model, batch)
    handle.remove()
    assert sorted(statistics) == [2, 3]
    assert set(statistics[2]) == {"window"}

    with torch.no_grad():
        dt = F.softplus(inputs[0] @ mixer.dt_weight.T + mixer.dt_bias)
        alpha = torch.exp(-dt * mixer.A_log.exp())
        beta = torch.sigmoid(inputs[0] @ mixer.beta_down_weight.T @ mixer.beta_up_weight.T).unflatten(-1, (8, 8))
        beta = beta * (F.softplus(mixer.b_scale) * dt).unsqueeze(-1)
        b = inputs[0] @ mixer.B_weight.T
        ratios = []
        for start, end in itertools.pairwise(offsets):
            padded = F.pad(b[start:end].T, (3, 0))
            k = F.silu(F.conv1d(padded[None], mixer.conv_B_weight[:, None], mixer.conv_B_bias, groups=8))[0].T
            importance = torch.zeros(8, 8, 8)
            for token in range(start, end):
                importance = alpha[token, :, None, None] * importance
                importance += beta[token, :, :, None] * k[token - start].square()
            for head in mixer.prior_log.exp()[:, None, None] + importance:
                ratios.append((head.max() - head.min()) / head.min())
    assert statistics[3]["window"] == pytest.approx(float((1 / (1 - alpha)).median()), rel=1e-4)
    assert statistics[3]["importance_ratio"] == pytest.approx(float(torch.stack(ratios).median()), rel=1e-4)
    assert statistics[3]["importance_ratio"] > 0


def test_nothing_is_recorded_afterwards():
    config = tiny_stage()
    model = build_model(config)
    batch = random_batch(config, seed=0)
    before = forward_loss(model, batch)
    memory_statistics(model, batch)
    assert all(layer.mixer.recorder is None for layer in model.decoder.layers if hasattr(layer, "mixer"))
    assert torch.equal(forward_loss(model, batch), before)


def test_a_head_that_forgets_nothing_has_a_finite_window():
    config = tiny_stage(model={"pattern": "P"})
    model = build_model(config)
    with torch.no_grad():
        model.decoder.layers[0].mixer.dt_bias.fill_(-200.0)
    window = memory_statistics(model, random_batch(config, seed=0))[1]["window"]
    assert 1e6 < window < float("inf")
