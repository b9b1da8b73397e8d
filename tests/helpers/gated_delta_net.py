"""Plain PyTorch in place of the kernels that `G` layers call, flash-linear-attention's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import palimpsa_kernels
import pytest
import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import common, gdn
from torch import Tensor

from megatron_palimpsa.model import gated_delta_net


def convolve(
    *,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    initial_state: None,
    output_final_state: bool,
    cu_seqlens: Tensor,
) -> tuple[Tensor, None]:
    offsets = cu_seqlens.to(torch.int32)
    return palimpsa_kernels.causal_conv1d(x, weight, bias, activation=activation, cu_seqlens=offsets), None


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """fla's chunk_gated_delta_rule, token by token: [1, T, H, ...] in q's dtype."""
    assert options == {"initial_state": None, "output_final_state": False, "use_qk_l2norm_in_kernel": False}
    outputs = []
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        state = q.new_zeros(q.shape[2], q.shape[3], v.shape[3])
        for t in range(start, end):
            state = state * g[0, t].exp()[:, None, None]
            read = torch.einsum("hk,hkv->hv", k[0, t], state)
            state = state + torch.einsum("hk,hv->hkv", k[0, t], beta[0, t][:, None] * (v[0, t] - read))
            outputs.append(torch.einsum("hk,hkv->hv", q[0, t], state) * q.shape[3] ** -0.5)
    return torch.stack(outputs)[None], None


@pytest.fixture
def pytorch_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(common, "HAVE_FLA", True)
    monkeypatch.setattr(common, "l2norm", lambda x: F.normalize(x, dim=-1))
    monkeypatch.setattr(gdn, "causal_conv1d", convolve)
    monkeypatch.setattr(gdn, "chunk_gated_delta_rule", delta_rule)
    monkeypatch.setattr(gated_delta_net, "require_kernels", lambda: None)
    with torch.compiler.set_stance("force_eager"):
        yield
