"""The gated norm against Hugging Face's, with Mamba2's grouping."""

from __future__ import annotations

import pytest
import torch
from megatron.core import parallel_state
from torch import nn
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from megatron_palimpsa.model.norm import GatedRMSNorm


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_gated_norm_groups_channels_as_hugging_face_does(groups):
    generator = torch.Generator().manual_seed(0)
    x, z, weight = (torch.randn(shape, generator=generator) for shape in ((3, 7, 32), (3, 7, 32), (32,)))
    ours = GatedRMSNorm(32, groups, 1e-5, torch.float32, parallel_state.get_tensor_model_parallel_group())
    theirs = MambaRMSNormGated(32, 32 // groups, eps=1e-5)
    ours.weight, theirs.weight = nn.Parameter(weight), nn.Parameter(weight)
    torch.testing.assert_close(ours(x, z), theirs(x, z), atol=1e-6, rtol=1e-6)


def test_gate_comes_before_the_norm():
    norm = GatedRMSNorm(4, 1, 1e-5, torch.float32, parallel_state.get_tensor_model_parallel_group())
    nn.init.ones_(norm.weight)
    x, z = torch.full((1, 4), 3.0), torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    gated = x * z * torch.sigmoid(z)
    torch.testing.assert_close(norm(x, z), gated / gated.square().mean().add(1e-5).sqrt())
