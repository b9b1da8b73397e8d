"""What is not kept for the backward pass, and that nothing but memory changes."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from helpers.models import randomise
from helpers.stages import random_batch, tiny_stage
from palimpsa_kernels import causal_conv1d, gated_rms_norm, mixing_scan
from palimpsa_kernels.mixing import Importance
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_palimpsa.model import build_model, forward_loss, loss, mixer
from megatron_palimpsa.model import norm as norm_module
from megatron_palimpsa.model.recompute import droppable, dropping

MODES = ("none", "selective", "full")
ALL_KINDS = {"pattern": "MP*-PQ"}


class NewStorages(TorchDispatchMode):
    """Every storage that an operation makes, and its size; `there` are the tensors there before."""

    def __init__(self, there: list[torch.Tensor]) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._there = {tensor.untyped_storage()._cdata for tensor in there}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._there:
                    self.made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        return result

    def alive(self) -> int:
        return sum(size for reference, size in self.made.values() if not reference.expired())


def kept_bytes(recompute: str, **model: Any) -> int:
    """Bytes that were made in a forward pass and live on while only the losses are held: what autograd keeps."""
    config = tiny_stage(model=model, train={"recompute": recompute, "precision": "bf16"})
    built = build_model(config)
    batch = random_batch(config, seed=2)
    there = [*built.parameters(), batch.tokens, batch.labels, batch.loss_mask, batch.cu_seqlens]
    with NewStorages(there) as storages:
        losses = forward_loss(built, batch)
    assert losses.requires_grad
    # What is garbage already, in cycles, is kept by nobody.
    gc.collect()
    return storages.alive()


def gradients(recompute: str, **model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    config = tiny_stage(model=model, train={"recompute": recompute})
    built = build_model(config)
    randomise(built)
    losses = forward_loss(built, random_batch(config, seed=2, padding=3))
    losses.sum().backward()
    return losses.detach(), {name: p.grad for name, p in built.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_the_same_bits(recompute: str, tied: bool) -> None:
    expected, reference = gradients("none", tie_embeddings=tied, **ALL_KINDS)
    losses, found = gradients(recompute, tie_embeddings=tied, **ALL_KINDS)
    assert torch.equal(losses, expected)
    for name, gradient in found.items():
        assert torch.equal(gradient, reference[name]), name


class SavesInputs(torch.autograd.Function):
    """A function that keeps its inputs for the backward pass and nothing else, as the Triton kernels do."""

    @staticmethod
    def forward(ctx: Any, function: Any, *inputs: Any) -> Any:
        ctx.function, ctx.others = function, [None if isinstance(x, torch.Tensor) else x for x in inputs]
        ctx.save_for_backward(*[x if isinstance(x, torch.Tensor) else None for x in inputs])
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError


@pytest.fixture
def kernels_that_keep_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    def conv(x: Any, weight: Any, bias: Any, **options: Any) -> Any:
        return SavesInputs.apply(partial(causal_conv1d, **options), x, weight, bias)

    def norm(x: Any, z: Any, weight: Any, **options: Any) -> Any:
        return SavesInputs.apply(partial(gated_rms_norm, **options), x, z, weight)

    def scan(q: Any, k: Any, x: Any, dt: Any, heads: Any, importance: Any, **options: Any) -> Any:
        def flat(q: Any, k: Any, x: Any, dt: Any, *rest: Any) -> Any:
            return mixing_scan(q, k, x, dt, heads, Importance(*rest) if rest else None, **options)[0]

        return SavesInputs.apply(flat, q, k, x, dt, *(importance or ())), ()

    monkeypatch.setattr(mixer, "causal_conv1d", conv)
    monkeypatch.setattr(mixer, "mixing_scan", scan)
    monkeypatch.setattr(norm_module, "gated_rms_norm", norm)


@pytest.mark.parametrize("symbol", ["M", "P"])
def test_a_layer_keeps_what_the_kernels_readme_says(symbol: str, kernels_that_keep_inputs: None) -> None:
    tokens, geometry = 64, {"vocab_size": 16, "seq_length": 64}
    one, two = ({mode: kept_bytes(mode, pattern=symbol * layers, **geometry) for mode in MODES} for layers in (1, 2))
    layer = {mode: two[mode] - one[mode] for mode in MODES}
    model = tiny_stage(model={"pattern": symbol, **geometry}).model
    hidden, inner, keys = model.hidden_size, model.d_inner, 2 * model.ngroups * model.d_state
    logits, rank = (inner, model.beta_rank) if symbol == "P" else (0, 0)
    # Norms' outputs, x, B and C behind the convolution, beta's logits; in bf16.
    dropped = tokens * 2 * (hidden + inner + keys + inner + logits)
    assert layer["none"] - layer["selective"] == dropped
    # The layer's input, z, x, B, C, dt and beta's low rank before the convolution, y; weights side by side are small.
    left = tokens * 2 * (hidden + 2 * inner + keys + model.nheads + rank + inner)
    assert left <= layer["selective"] < left + 4096
    # The residual stream in fp32.
    assert layer["full"] == tokens * 4 * hidden
    # The softmax in fp32, which label it is and whether it is this rank's.
    assert one["none"] - one["selective"] - dropped == tokens * (4 * model.padded_vocab_size + 8 + 1)


@pytest.mark.parametrize("tokens", [5, 16])
def test_logits_of_some_tokens_at_a_time(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, reference = gradients("none", **ALL_KINDS)
    monkeypatch.setattr(loss, "TOKENS", tokens)
    losses, found = gradients("selective", **ALL_KINDS)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, reference[name], rtol=1e-5, atol=1e-5, msg=name)


def test_a_step_runs_again_once_and_frees_what_it_formed() -> None:
    runs = []

    def double(x: torch.Tensor) -> torch.Tensor:
        runs.append(x.requires_grad)
        return 2 * x

    x = torch.randn(4, 3, requires_grad=True)
    with dropping():
        # The second step's input is itself dropped, and two operations keep its result, one of them as a view.
        y = droppable(double, droppable(double, x * 1))
        total = (y.square().sum() + y.T.cos().sum(1).sum()) / 2
    weak = StorageWeakRef(y.untyped_storage())
    del y
    assert weak.expired()
    assert runs == [True, True]
    total.backward()
    assert runs == [True, True, False, False]
    torch.testing.assert_close(x.grad, 4 * (4 * x.detach() - torch.sin(4 * x.detach()) / 2))
    assert droppable(double, x).requires_grad
