"""The plan's arithmetic against the real model."""

import pytest
from helpers.stages import tiny_stage

from megatron_palimpsa import parallel
from megatron_palimpsa.model import build_model
from megatron_palimpsa.training.parameters import count_parameters
from megatron_palimpsa.training.plan import checkpoint_bytes, share_bytes

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
        {"pattern": "Q-L", "headdim": 16, "beta_rank": 7},
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
    assert share_bytes(config, 1) == 12 * 2_702_599_680
    assert share_bytes(config, 8) == 12 * 2_702_599_680 // 8
