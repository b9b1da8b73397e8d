"""What the Triton kernels' layers keep for the backward pass on a GPU, and that the gradients are the same bits.

Runs by itself on a machine without the rest of the project's dependencies:

    PYTHONPATH=.:kernels:tests python -m pytest --noconftest -c /dev/null -p no:cacheprovider \
        -rP tests/model/test_recompute_gpu.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.single_process import single_process as single_process
from helpers.stages import random_batch, tiny_stage

from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.model import build_model, forward_loss

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MODES = ("none", "selective", "full")
TOKENS = 8192
GEOMETRY: dict[str, Any] = {
    "hidden_size": 2560,
    "vocab_size": 512,
    "seq_length": TOKENS,
    "d_state": 128,
    "headdim": 64,
    "beta_rank": 128,
}
"""A layer of the 2.7B model."""


def stage(recompute: str, pattern: str) -> StageConfig:
    train = {"recompute": recompute, "precision": "bf16", "global_batch_tokens": TOKENS, "tokens": 100 * TOKENS}
    return tiny_stage(model={**GEOMETRY, "pattern": pattern}, train=train)


def kept_bytes(recompute: str, pattern: str) -> int:
    config = stage(recompute, pattern)
    model, batch = build_model(config), random_batch(config, seed=1).to(torch.device("cuda"))
    # The first pass compiles and makes what lasts.
    forward_loss(model, batch).sum().backward()
    model.zero_grad()
    before = torch.cuda.memory_allocated()
    losses = forward_loss(model, batch)
    kept = torch.cuda.memory_allocated() - before
    losses.sum().backward()
    return kept


@pytest.mark.parametrize("symbol", ["M", "P"])
def test_a_layer_keeps_what_the_kernels_readme_says(symbol: str) -> None:
    kept = {mode: (kept_bytes(mode, symbol * 2) - kept_bytes(mode, symbol)) / TOKENS for mode in MODES}
    for mode, size in kept.items():
        print(f"{symbol} {mode:9} {size:9.0f} bytes a token and layer")
    model = stage("none", symbol).model
    hidden, inner, keys = model.hidden_size, model.d_inner, 2 * model.ngroups * model.d_state
    dropped = 2 * (hidden + inner + keys + inner + (inner if symbol == "P" else 0))
    assert kept["none"] - kept["selective"] == pytest.approx(dropped, rel=0.01)
    assert kept["full"] == pytest.approx(4 * hidden, rel=0.01)


def test_gradients_are_the_same_bits() -> None:
    found: dict[str, dict[str, torch.Tensor]] = {}
    for mode in MODES:
        config = stage(mode, "MP")
        model, batch = build_model(config), random_batch(config, seed=1, padding=100).to(torch.device("cuda"))
        (forward_loss(model, batch) * batch.loss_mask).sum().backward()
        found[mode] = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    for mode in ("selective", "full"):
        for name, gradient in found[mode].items():
            # Logits of 4096 tokens at a time: the output weight's gradient is summed in another order.
            if name != "embedding.word_embeddings.weight":
                assert torch.equal(gradient, found["none"][name]), f"{mode}: {name}"
