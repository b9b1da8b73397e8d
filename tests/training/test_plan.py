"""The plan's arithmetic against the real model."""

import pytest
import torch
from helpers.stages import random_batch, tiny_stage

from megatron_palimpsa import parallel
from megatron_palimpsa.model import build_model, forward_loss
from megatron_palimpsa.training.plan import checkpoint_bytes, count_parameters, estimate_memory

MAMBA2_2_7B = {
    "pattern": "M" * 64,
    "hidden_size": 2560,
    "vocab_size": 50277,
    "seq_length": 4096,
    "d_state": 128,
    "headdim": 64,
    "num_attention_heads": None,
    "num_query_groups": None,
    "ffn_hidden_size": None,
}


@pytest.fixture
def one_process():
    config = tiny_stage()
    parallel.initialize(config.parallel, config.seed)
    yield
    parallel.destroy()


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"pattern": "M"},
        {"pattern": "PP", "ngroups": 2, "beta_rank": 7},
        {"pattern": "*-", "num_query_groups": None, "tie_embeddings": False},
        {"pattern": "MP", "expand": 4, "d_conv": 3, "vocab_multiple": 64},
    ],
)
def test_parameters_equal_the_built_model(one_process, model):
    config = tiny_stage(model=model)
    built = build_model(config)
    assert count_parameters(config.model) == sum(parameter.numel() for parameter in built.parameters())


def test_the_2_7b_model_has_its_published_size_and_checkpoint():
    config = tiny_stage(model=MAMBA2_2_7B, train={"global_batch_tokens": 4096, "tokens": 4096 * 100})
    assert count_parameters(config.model) == 2_702_599_680
    assert 32e9 < checkpoint_bytes(config.model) < 38e9


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("pattern", ["M", "P", "*", "-", "MPP*-"])
def test_activations_are_near_what_backward_keeps(one_process, pattern, precision):
    model = {"pattern": pattern, "hidden_size": 64, "seq_length": 256, "d_state": 16, "headdim": 16, "beta_rank": 8}
    train = {"precision": precision, "global_batch_tokens": 256, "tokens": 2560}
    config = tiny_stage(model={**model, "ffn_hidden_size": 128}, train=train)
    built = build_model(config)
    weights = {parameter.untyped_storage().data_ptr() for parameter in built.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        losses = forward_loss(built, random_batch(config, seed=1))
    assert losses.requires_grad
    ratio = sum(storage.nbytes() for storage in kept.values()) / estimate_memory(config, 1).activations
    assert 0.6 < ratio < 1.6


def test_memory_is_shared_over_the_layout():
    model = {**MAMBA2_2_7B, "pattern": "M" * 64}
    train = {"global_batch_tokens": 2**16, "tokens": 2**24, "precision": "bf16"}
    alone = estimate_memory(tiny_stage(model=model, train=train), 1)
    parameters = 2_702_599_680
    assert (alone.weights, alone.gradients, alone.optimizer) == (2 * parameters, 4 * parameters, 12 * parameters)
    halved = estimate_memory(tiny_stage(2, model=model, train=train, parallel={"tp": 2}), 1)
    assert halved.weights * 2 == alone.weights
    spread = estimate_memory(tiny_stage(4, model=model, train=train), 4)
    assert (spread.weights, spread.optimizer * 4) == (alone.weights, alone.optimizer)
    recomputed = estimate_memory(tiny_stage(model=model, train={**train, "recompute": "full"}), 1)
    assert recomputed.activations * 4 < alone.activations
    staged = estimate_memory(tiny_stage(2, model=model, train=train, parallel={"pp": 2}), 1)
    assert 0.5 * alone.weights < staged.weights < 0.55 * alone.weights
