"""Initial weights: ranges, and independence of the layout."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from helpers.stages import tiny_stage

from megatron_palimpsa.model import build_model
from megatron_palimpsa.model.naming import global_parameters
from megatron_palimpsa.model.tensor_parallel import full_shape, local_share, make_parameter
from megatron_palimpsa.model.weights import load_full_weights

BIG = {"hidden_size": 256, "beta_rank": 16, "pattern": "PM"}


def parameters(config):
    return dict(global_parameters(build_model(config)))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_initial_values_lie_where_mamba2_and_palimpsa_put_them(precision):
    weights = parameters(tiny_stage(model=BIG, train={"precision": precision}))
    for layer in (0, 1):
        mixer = {name.split(".mixer.")[1]: w.detach() for name, w in weights.items() if f"layers.{layer}.mixer" in name}
        dt = F.softplus(mixer["dt_bias"])
        assert dt.min() >= 1e-3 * (1 - 1e-5)
        assert dt.max() <= 1e-1 * (1 + 1e-5)
        # Log-uniform: half of the heads lie below the geometric mean.
        assert 0.3 < (dt < 1e-2).float().mean() < 0.7
        A = mixer["A_log"].exp()
        assert 1 <= A.min() < 4
        assert 13 < A.max() <= 16
        assert torch.equal(mixer["D"], torch.ones(64))
        assert mixer["conv_x_weight"].abs().max() <= 0.5
        assert mixer["conv_B_bias"].float().std() == pytest.approx(0.5 / math.sqrt(3), rel=0.4)
        assert mixer["x_weight"].float().std() == pytest.approx(0.02, rel=0.02)
        assert mixer["out_proj.weight"].float().std() == pytest.approx(0.02 / math.sqrt(2), rel=0.02)
    palimpsa = {name.split(".mixer.")[1]: w.detach() for name, w in weights.items() if "layers.0.mixer" in name}
    assert palimpsa["beta_down_weight"].float().std() == pytest.approx(0.02, rel=0.05)
    assert palimpsa["beta_up_weight"].abs().max() <= 0.25
    assert palimpsa["beta_up_weight"].float().std() == pytest.approx(0.25 / math.sqrt(3), rel=0.05)
    assert torch.equal(palimpsa["b_scale"], torch.ones(64))
    assert torch.equal(palimpsa["prior_log"], torch.zeros(64))


def test_rates_start_in_the_range_that_is_asked_for():
    weights = parameters(tiny_stage(model={**BIG, "a_min": 0.01, "a_max": 0.16}))
    A = weights["decoder.layers.0.mixer.A_log"].exp()
    assert 0.01 <= A.min() < 0.04
    assert 0.13 < A.max() <= 0.16


@pytest.mark.parametrize(
    ("setting", "raw", "effective"),
    [
        ("scratch", (1.0, 1.0), (1.31, 1.32)),
        ("finetune", (0.1, 1.0), (0.74, 1.32)),
        ("finetune-effective", (-2.26, 0.55), (0.1, 1.0)),
    ],
)
def test_beta_scale(setting, raw, effective):
    b_scale = parameters(tiny_stage(model={**BIG, "beta_scale_init": setting}))["decoder.layers.0.mixer.b_scale"]
    for values, (low, high) in ((b_scale, raw), (F.softplus(b_scale), effective)):
        assert low <= values.min() <= values.max() <= high
    assert setting == "scratch" or b_scale.std() > 0.1


def test_same_seed_same_weights_and_other_layers_other_weights():
    first, second = (parameters(tiny_stage(model={"pattern": "MMP"})) for _ in range(2))
    assert all(torch.equal(w, second[name]) for name, w in first.items())
    other_seed = parameters(tiny_stage(model={"pattern": "MMP"}, seed=99))
    assert not torch.equal(first["decoder.layers.0.mixer.x_weight"], other_seed["decoder.layers.0.mixer.x_weight"])
    assert not torch.equal(first["decoder.layers.0.mixer.x_weight"], first["decoder.layers.1.mixer.x_weight"])
    # A layer's weights do not depend on what its neighbours are.
    neighbours = parameters(tiny_stage(model={"pattern": "*-P"}))
    assert torch.equal(first["decoder.layers.2.mixer.x_weight"], neighbours["decoder.layers.2.mixer.x_weight"])


def test_shares_of_a_split_parameter():
    parameter = make_parameter(3, 2, dtype=torch.float32, partition_dim=0)
    assert full_shape(parameter, 2) == [6, 2]
    full = torch.arange(12.0).view(6, 2)
    assert torch.equal(local_share(full, parameter, 1, 2), full[3:])
    # Gate and up projection behind one another, each split by itself.
    stacked = make_parameter(4, dtype=torch.float32, partition_dim=0)
    stacked.partition_stride = 2
    assert local_share(torch.arange(8.0), stacked, 1, 2).tolist() == [2, 3, 6, 7]
    whole = make_parameter(3, dtype=torch.float32)
    assert local_share(torch.arange(3.0), whole, 1, 2).tolist() == [0, 1, 2]


def test_weights_of_another_shape_are_refused():
    model = build_model(tiny_stage(model={"pattern": "M"}))
    weights = dict(global_parameters(build_model(tiny_stage(model={"pattern": "M", "d_state": 4}))))
    with pytest.raises(ValueError, match=r"layers.0.mixer.B_weight has shape \[4, 32\], the model needs \[8, 32\]"):
        load_full_weights(model, weights)
