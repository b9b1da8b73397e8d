"""Palimpsa-D on a GPU, over the Triton kernels, against the float64 model written token by token."""

from __future__ import annotations

import pytest
import torch
from helpers import reference_model
from helpers.models import randomise
from helpers.reference_model import relative_error
from helpers.single_process import single_process as single_process
from helpers.stages import random_batch, tiny_stage

from megatron_palimpsa.model import build_model, forward_loss
from megatron_palimpsa.model.naming import global_parameters

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-4), ("bf16", 5e-2)])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_losses_and_gradients(precision: str, bound: float, recompute: str) -> None:
    config = tiny_stage(
        model={"pattern": "Q-L", "hidden_size": 96, "d_state": 48, "headdim": 96, "seq_length": 96},
        train={"precision": precision, "recompute": recompute, "global_batch_tokens": 96, "tokens": 9600},
    )
    model, batch = build_model(config).cpu(), random_batch(config, seed=3, padding=5)
    randomise(model, scale=0.05)
    weights = {name: p.detach().cpu().double().requires_grad_() for name, p in global_parameters(model)}
    expected = reference_model.losses(weights, config.model, batch.tokens, batch.labels, batch.cu_seqlens)
    expected.sum().backward()
    losses = forward_loss(model.cuda(), batch.to(torch.device("cuda")))[0, : len(expected)]
    losses.sum().backward()
    trained = {name: p.grad.cpu() for name, p in global_parameters(model) if p.requires_grad}
    errors = {name: relative_error(gradient, weights[name].grad) for name, gradient in trained.items()}
    errors["losses"] = relative_error(losses.detach().cpu(), expected.detach())
    # D's gradient is one number a head, a sum whose terms cancel.
    beyond = {name: e for name, e in errors.items() if not e < (4 * bound if name.endswith(".D") else bound)}
    assert not beyond, beyond
