"""The exported model's plain scans against the float64 recurrences, with every kind of decay and with padding."""

from __future__ import annotations

import pytest
import torch
from helpers.kernel_cases import assert_close, make_inputs, palimpsa_results, ssd_results
from palimpsa_kernels.reference import causal_conv1d_reference, palimpsa_reference, ssd_reference
from torch import Tensor

from megatron_palimpsa.hf import scans_palimpsa
from megatron_palimpsa.hf.scans_palimpsa import causal_conv1d, mixing_scan, scan

BOUND = 1e-6


def palimpsa(q, k, v, beta, log_alpha, prior, initial_state):
    return scan(q, k, v, log_alpha, beta, prior, initial_state)


def ssd(q, k, v, log_alpha, initial_state):
    y, (mean,) = scan(q, k, v, log_alpha, states=None if initial_state is None else (initial_state,))
    return y, mean


@pytest.mark.parametrize("tokens", [1, 31, 32, 75])
@pytest.mark.parametrize("initial", [True, False])
def test_outputs_states_and_gradients_are_the_reference_s(monkeypatch, tokens: int, initial: bool) -> None:
    inputs = make_inputs(tokens, batch=2, states=2, seed=tokens)
    # A segment of one chunk, so that states pass from segment to segment too.
    monkeypatch.setattr(scans_palimpsa, "SEGMENT_ELEMENTS", 1 if initial else 2**23)
    expected = palimpsa_results(palimpsa_reference, inputs, dtype=torch.float64, initial=initial)
    assert_close(palimpsa_results(palimpsa, inputs, initial=initial), expected, BOUND)
    expected = ssd_results(ssd_reference, inputs, dtype=torch.float64, initial=initial)
    assert_close(ssd_results(ssd, inputs, initial=initial), expected, BOUND)


def test_the_strongest_decay_forgets_and_nothing_is_divided_by_it() -> None:
    inputs = make_inputs(70)
    inputs["log_alpha"][:, 20:60] = -100.0
    y, states = palimpsa(*(inputs[name] for name in ("q", "k", "v", "beta", "log_alpha", "prior")), None)
    late = {name: value[:, 59:] if value.shape[:1] == (1,) else value for name, value in inputs.items()}
    late["log_alpha"][:, 0] = 0.0
    wanted, wanted_states = palimpsa_reference(
        *(late[name] for name in ("q", "k", "v", "beta", "log_alpha", "prior")), initial_state=None
    )
    torch.testing.assert_close(y[:, 59:].double(), wanted, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(states, wanted_states, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5)


def mixing_inputs(tokens: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "q": normal(2, tokens, 2, 8),
        "k": normal(2, tokens, 2, 8),
        "x": normal(2, tokens, 4, 6),
        "dt": 3 * normal(2, tokens, 4),
        "logits": normal(2, tokens, 4, 6),
        "strength": 3 * normal(2, tokens, 4),
    }


@pytest.mark.parametrize("importance", [True, False])
@pytest.mark.parametrize("strength", [True, False])
def test_padded_tokens_neither_write_nor_decay(importance: bool, strength: bool) -> None:
    tokens, padded = 40, 9
    inputs = mixing_inputs(tokens)
    heads = torch.linspace(-2, 2, 4), torch.linspace(0, 3, 4), torch.ones(4)

    def run(parts: dict[str, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        of_beta = (parts["logits"], torch.ones(4), torch.full((4,), 0.7)) if importance else None
        write = parts["strength"] if strength else None
        return mixing_scan(parts["q"], parts["k"], parts["x"], parts["dt"], heads, of_beta, write)

    alone, states = run({name: value[1:, padded:] for name, value in inputs.items()})
    for name in ("dt", "strength"):
        inputs[name][1, :padded] = -1e4
    y, final = run(inputs)
    torch.testing.assert_close(y[1:, padded:], alone, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(final, states, strict=True):
        torch.testing.assert_close(ours[1:], theirs, atol=1e-6, rtol=1e-5)
    assert len(final) == 1 + importance


@pytest.mark.parametrize("tokens", [1, 2, 20])
def test_convolution_with_and_without_what_came_before(tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, window = torch.randn(2, tokens, 5, generator=generator), torch.randn(2, 5, 3, generator=generator)
    weight, bias = torch.randn(5, 4, generator=generator), torch.randn(5, generator=generator)
    for before in (None, window):
        y, after = causal_conv1d(x, weight, bias, before)
        wanted, wanted_after = causal_conv1d_reference(x, weight, bias, initial_state=before)
        torch.testing.assert_close(y.double(), wanted, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(after.double(), wanted_after)
