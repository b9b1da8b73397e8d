"""Palimpsa-D on a GPU, over the Triton kernels, beside the same model on the CPU."""

from __future__ import annotations

import pytest
import torch
from helpers.models import randomise
from helpers.reference_model import relative_error
from helpers.stages import random_batch, tiny_stage

from megatron_palimpsa.model import build_model, forward_loss

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-4), ("bf16", 5e-2)])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_losses_and_gradients(precision: str, bound: float, recompute: str) -> None:
    config = tiny_stage(
        model={"pattern": "Q-L", "hidden_size": 96, "d_state": 48, "headdim": 96, "seq_length": 256},
        train={"precision": precision, "recompute": recompute, "global_batch_tokens": 256, "tokens": 25600},
    )
    model, batch = build_model(config).cpu(), random_batch(config, seed=3, padding=5)
    randomise(model, scale=0.05)
    results = []
    for device in ("cpu", "cuda"):
        model = model.to(device)
        model.zero_grad()
        losses = forward_loss(model, batch.to(torch.device(device)))[0, :-5]
        losses.sum().backward()
        gradients = {name: p.grad.cpu() for name, p in model.named_parameters() if p.requires_grad}
        results.append({"losses": losses.detach().cpu()} | gradients)
    errors = {name: relative_error(results[1][name], value) for name, value in results[0].items()}
    assert max(errors.values()) < bound, errors
