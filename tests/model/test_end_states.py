"""End states without a scan, against the final states of the scan and their gradients."""

from __future__ import annotations

import pytest
import torch
from helpers.mixing_cases import mixing_inputs
from palimpsa_kernels import HeadParameters, Importance, mixing_scan

from megatron_palimpsa.model import end_states as module


@pytest.mark.parametrize("importance", [True, False])
@pytest.mark.parametrize("block", [2048, 5])
def test_states_and_gradients_are_those_of_the_scan(
    importance: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK_TOKENS", block)
    inputs = {
        name: x.requires_grad_() for name, x in mixing_inputs(initial=False, importance=importance, tokens=13).items()
    }
    names = [name for name in inputs if name not in ("q", "D", "prior")]
    heads = HeadParameters(inputs["dt_bias"], inputs["A_log"], inputs["D"])
    of_beta = Importance(inputs["logits"], inputs["b_scale"], inputs["prior"]) if importance else None
    q, k, x, dt = (inputs[name] for name in ("q", "k", "x", "dt"))
    _, expected = mixing_scan(q, k, x, dt, heads, of_beta, output_final_state=True)
    generator = torch.Generator().manual_seed(1)
    adjoints = [torch.randn(state.shape, generator=generator) for state in expected]
    expected_gradients = torch.autograd.grad(expected, [inputs[name] for name in names], adjoints)

    one_row = None if of_beta is None else of_beta._replace(logits=of_beta.logits[0])
    states, decay = module.end_states(k[0], x[0], dt[0], heads, one_row)
    gradients = torch.autograd.grad(states, [inputs[name] for name in names], [a[0] for a in adjoints])

    for state, other in zip(states, expected, strict=True):
        torch.testing.assert_close(state, other[0], rtol=1e-5, atol=1e-5)
    for name, gradient, other in zip(names, gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
    log_alpha = (-torch.nn.functional.softplus(dt[0] + heads.dt_bias) * heads.A_log.exp()).clamp(min=-100)
    torch.testing.assert_close(decay, log_alpha.double().sum(0).exp().float())
