"""The float64 recurrences against numbers worked out by hand."""

import math

import pytest
import torch
from helpers.kernel_cases import make_inputs, offsets
from palimpsa_kernels import chunk_palimpsa, palimpsa_step
from palimpsa_kernels.reference import causal_conv1d_reference, palimpsa_reference, ssd_reference


def scalar(value, *shape):
    return torch.full(shape, float(value))


def one_token(function, mean, importance, alpha, *, v=0.0, beta=1.0, key=1.0, prior=1.0):
    """(y, M, Ibar) behind one token of a scalar state with q = 1."""
    y, (final_mean, final_importance) = function(
        scalar(1, 1, 1, 1, 1),
        scalar(key, 1, 1, 1, 1),
        scalar(v, 1, 1, 1, 1),
        scalar(beta, 1, 1, 1, 1),
        scalar(math.log(alpha), 1, 1, 1),
        scalar(prior, 1),
        initial_state=(scalar(mean, 1, 1, 1, 1), scalar(importance, 1, 1, 1, 1)),
    )
    return y.item(), final_mean.item(), final_importance.item()


def chunked(*args, **kwargs):
    return chunk_palimpsa(*args, **kwargs, output_final_state=True)


def step(q, k, v, beta, log_alpha, prior, *, initial_state):
    y = palimpsa_step(q[:, 0], k[:, 0], v[:, 0], beta[:, 0], log_alpha[:, 0], prior, initial_state)
    return y[:, None], initial_state


@pytest.mark.parametrize("function", [palimpsa_reference, chunked, step])
@pytest.mark.parametrize(
    ("importance_before", "importance_after", "posterior_mean"), [(1.0, 2.0, 0.45), (9.0, 9.2, 8.1 / 9.2)]
)
def test_important_states_move_less(function, importance_before, importance_after, posterior_mean):
    """The paper's example: mean 1 before, target 0, alpha 0.9; importance 1 halves the mean, 9 keeps most of it."""
    y, _, importance = one_token(function, mean=importance_before, importance=importance_before - 1, alpha=0.9)
    assert 1 + importance == pytest.approx(importance_after, rel=1e-6)
    assert y == pytest.approx(posterior_mean, rel=1e-6)


@pytest.mark.parametrize("function", [palimpsa_reference, chunked, step])
def test_importance_relaxes_to_the_prior_without_evidence(function):
    _, _, importance = one_token(function, mean=1, importance=8, alpha=0.9, beta=0, prior=2.0)
    assert importance == pytest.approx(0.9 * 8, rel=1e-6)


def test_two_tokens_with_matrix_states():
    """V = 1, K = 2: M = a (1, 2) * 3 + 5 (1, -1), Ibar = a 2 (1, 4) + 1 (1, 1), prior 1, a = 1/2, q = (1, 10)."""
    q = torch.tensor([[[[0.0, 0.0]], [[1.0, 10.0]]]])
    k = torch.tensor([[[[1.0, 2.0]], [[1.0, -1.0]]]])
    v = torch.tensor([3.0, 5.0]).view(1, 2, 1, 1)
    beta = torch.tensor([2.0, 1.0]).view(1, 2, 1, 1)
    log_alpha = torch.full((1, 2, 1), math.log(0.5))
    y, (mean, importance) = palimpsa_reference(q, k, v, beta, log_alpha, torch.ones(1), scale=2.0)
    torch.testing.assert_close(mean.flatten().tolist(), [6.5, -2.0])
    torch.testing.assert_close(importance.flatten().tolist(), [2.0, 5.0])
    assert y[0, 1].item() == pytest.approx(2 * (6.5 / 3 + 10 * -2 / 6))
    y, mean = ssd_reference(q, k, v, log_alpha)
    assert y[0, 1].item() == pytest.approx(6.5 - 20)


def test_documents_start_anew_and_padding_is_zero():
    inputs = {name: x.double() for name, x in make_inputs(9).items()}
    arguments = [inputs[name] for name in ("q", "k", "v", "beta", "log_alpha", "prior")]
    packed, (mean, _) = palimpsa_reference(*arguments, cu_seqlens=offsets(0, 3, 3, 7))
    alone, (last_mean, _) = palimpsa_reference(*(x[:, 3:7] for x in arguments[:5]), arguments[5])
    torch.testing.assert_close(packed[:, 3:7], alone)
    torch.testing.assert_close(mean[2], last_mean[0])
    assert not mean[1].any()
    assert not packed[:, 7:].any()


def test_convolution_of_three_tokens():
    x = torch.tensor([1.0, 2.0, 4.0]).view(1, 3, 1)
    weight, bias = torch.tensor([[10.0, 1.0]]), torch.tensor([0.5])
    y, state = causal_conv1d_reference(x, weight, bias, activation=None, cu_seqlens=offsets(0, 2, 3))
    torch.testing.assert_close(y.flatten().tolist(), [1.5, 12.5, 4.5])
    torch.testing.assert_close(state.flatten().tolist(), [2.0, 4.0])
