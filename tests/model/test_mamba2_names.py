"""Hugging Face's Mamba2 weights in our model."""

from __future__ import annotations

import pytest
import torch
from helpers.stages import tiny_stage
from transformers import Mamba2Config, Mamba2ForCausalLM

from megatron_palimpsa.model import build_model
from megatron_palimpsa.model.mamba2_names import from_mamba2, to_mamba2
from megatron_palimpsa.model.naming import global_parameters
from megatron_palimpsa.model.weights import load_full_weights

GEOMETRY = {"pattern": "MMM", "hidden_size": 32, "vocab_size": 64, "d_state": 16, "headdim": 8}


def mamba2_with_random_weights(ngroups: int, tied: bool) -> Mamba2ForCausalLM:
    torch.manual_seed(0)
    model = Mamba2ForCausalLM(
        Mamba2Config(
            num_heads=8,
            head_dim=8,
            vocab_size=64,
            hidden_size=32,
            state_size=16,
            num_hidden_layers=3,
            expand=2,
            n_groups=ngroups,
            chunk_size=16,
            residual_in_fp32=True,
            tie_word_embeddings=tied,
        )
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(("ngroups", "tied"), [(1, True), (2, True), (2, False)])
def test_logits_are_those_of_hugging_face(ngroups, tied):
    theirs = mamba2_with_random_weights(ngroups, tied)
    config = tiny_stage(model={**GEOMETRY, "ngroups": ngroups, "tie_embeddings": tied})
    ours = build_model(config)
    load_full_weights(ours, from_mamba2(theirs.state_dict(), config.model))
    tokens = torch.randint(64, (2, 37), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits
        actual = ours(input_ids=tokens, position_ids=None, attention_mask=None)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    assert expected.std() > 0.5


@pytest.mark.parametrize("tied", [True, False])
def test_names_map_back_to_the_same_weights(tied):
    theirs = mamba2_with_random_weights(2, tied).state_dict()
    config = tiny_stage(model={**GEOMETRY, "ngroups": 2, "tie_embeddings": tied})
    ours = from_mamba2(theirs, config.model)
    assert set(ours) == {name for name, _ in global_parameters(build_model(config))}
    back = to_mamba2(ours, config.model)
    assert set(theirs) - set(back) == ({"lm_head.weight"} if tied else set())
    for name, tensor in back.items():
        assert torch.equal(tensor, theirs[name]), name


def test_another_geometry_is_refused():
    theirs = mamba2_with_random_weights(2, tied=True).state_dict()
    config = tiny_stage(model={**GEOMETRY, "ngroups": 1})
    with pytest.raises(ValueError, match=r"in_proj.weight is \[200, 32\], this model's geometry needs \[168, 32\]"):
        from_mamba2(theirs, config.model)
