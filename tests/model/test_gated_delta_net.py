"""Megatron's Gated DeltaNet as `G` layers, with plain PyTorch in place of flash-linear-attention's kernels."""

import pytest
import torch
from helpers import reference_model
from helpers.gated_delta_net import pytorch_kernels as pytorch_kernels
from helpers.models import randomise
from helpers.mqar import write_recipe
from helpers.runs import write_stage
from helpers.single_process import single_process as single_process
from helpers.stages import random_batch, tiny_stage
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.ssm.gated_delta_net import common

from megatron_palimpsa import cli
from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.model import build_model, forward_loss
from megatron_palimpsa.model.naming import global_parameters
from megatron_palimpsa.training.parameters import count_parameters

MODEL = {"pattern": "G-G", "headdim": 16}


def test_losses_and_gradients_equal_a_float64_model_written_token_by_token(pytorch_kernels):
    config = tiny_stage(model=MODEL)
    model = build_model(config)
    assert count_parameters(config.model) == sum(p.numel() for p in model.parameters())
    randomise(model)
    batch = random_batch(config, seed=3, padding=2)
    inside = int(batch.cu_seqlens[-1])
    weights = {name: p.detach().double().requires_grad_() for name, p in global_parameters(model)}
    expected = reference_model.losses(weights, config.model, batch.tokens, batch.labels, batch.cu_seqlens)
    expected.sum().backward()
    actual = forward_loss(model, batch)[0, :inside]
    actual.sum().backward()
    assert reference_model.relative_error(actual.detach(), expected.detach()) < 1e-6
    errors = {n: reference_model.relative_error(p.grad, weights[n].grad) for n, p in global_parameters(model)}
    assert max(errors.values()) < 3e-5, errors

    context = StaticInferenceContext(max_batch_size=1, max_sequence_length=8)
    with torch.no_grad(), pytest.raises(ConfigError, match="cannot generate"):
        model(batch.tokens[:, :4], None, None, inference_context=context)


def test_precisions_and_weight_decay(pytorch_kernels):
    model = build_model(tiny_stage(model=MODEL, train={"precision": "bf16"}))
    for name, parameter in model.named_parameters():
        is_fp32 = name.endswith(("A_log", "dt_bias"))
        assert parameter.dtype == (torch.float32 if is_fp32 else torch.bfloat16), name
        assert getattr(parameter, "keep_fp32", False) == is_fp32, name
        assert getattr(parameter, "no_weight_decay", False) == (parameter.dim() == 1), name


def test_where_it_cannot_run_it_is_refused_by_name(monkeypatch):
    with pytest.raises(ConfigError, match=r"parallel.tp=2 is not for Gated DeltaNet layers \(G\)"):
        tiny_stage(2, model=MODEL, parallel={"tp": 2})
    for installed, message in ((False, "need flash-linear-attention"), (True, "need a GPU")):
        monkeypatch.setattr(common, "HAVE_FLA", installed)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(ConfigError, match=message):
            build_model(tiny_stage(model=MODEL))


def test_where_it_cannot_run_nothing_is_written(monkeypatch, tmp_path, tiny_data, capsys):
    monkeypatch.setattr(common, "HAVE_FLA", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "stage").mkdir()
    stage = write_stage(tmp_path / "stage", tiny_data, model=MODEL)
    sweep = write_recipe(tmp_path, model={"pattern": "GP"})
    assert cli.main(["train", str(stage), "--dry-run"]) == 0
    before = sorted(tmp_path.rglob("*"))
    for command in (["train", str(stage)], ["mqar", str(sweep)]):
        assert cli.main(command) == 2
        assert "need flash-linear-attention" in capsys.readouterr().err
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.gpu
@pytest.mark.skipif(not (torch.cuda.is_available() and common.HAVE_FLA), reason="needs a CUDA device and fla")
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_kernels_compute_what_stands_in_for_them(recompute, request):
    config = tiny_stage(
        model={**MODEL, "hidden_size": 64, "d_state": 32, "headdim": 32, "seq_length": 128},
        train={"precision": "bf16", "recompute": recompute, "global_batch_tokens": 128, "tokens": 12800},
    )
    batch = random_batch(config, seed=3, padding=2).to(torch.device("cuda"))
    results = []
    for fixture in (None, "pytorch_kernels"):
        if fixture is not None:
            request.getfixturevalue(fixture)
        model = build_model(config)
        losses = forward_loss(model, batch)[0, :-2]
        losses.sum().backward()
        results.append({"losses": losses.detach()} | {n: p.grad for n, p in global_parameters(model)})
    found, expected = results
    errors = {name: reference_model.relative_error(found[name], value) for name, value in expected.items()}
    assert max(errors.values()) < 5e-2, errors
