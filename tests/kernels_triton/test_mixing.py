"""Activations, scan and skip as one function, against the definition in float64: outputs and every gradient."""

import pytest
import torch
from helpers.mixing_cases import call_mixing, mixing_definition, mixing_errors, mixing_inputs, mixing_results
from palimpsa_kernels import mixing_scan as composed_scan

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUND = 1e-5
CASES = {
    "palimpsa": {},
    "rows, odd sizes": {"batch": 2, "states": 2, "tokens": 7, "value_dim": 18, "key_dim": 17, "heads": 2},
    "packed": {"states": 4, "tokens": 12},
    "mamba2": {"importance": False, "initial": False},
    "palimpsa-d": {"strength": True, "batch": 2, "states": 2, "tokens": 7},
    "palimpsa-d, without importance": {"strength": True, "importance": False, "initial": False},
}


@pytest.mark.parametrize("name", CASES)
def test_against_the_definition(name: str) -> None:
    from palimpsa_kernels.triton import mixing_scan

    offsets = (0, 0, 5, 5, 11) if name == "packed" else None
    inputs = mixing_inputs(**CASES[name])
    expected = mixing_results(mixing_definition, inputs, dtype=torch.float64, offsets=offsets)
    result = mixing_results(mixing_scan, inputs, device=DEVICE, offsets=offsets)
    wrong = {n: e for n, e in mixing_errors(result, expected).items() if not e <= BOUND}
    assert not wrong, wrong


@pytest.mark.parametrize("strength", [False, True], ids=["dt", "strength"])
@pytest.mark.parametrize("importance", [True, False], ids=["palimpsa", "mamba2"])
def test_half_precision_loses_no_more_than_pytorch_operations_around_the_scan(importance: bool, strength: bool) -> None:
    """Of dt, dt_bias and A_log, whose gradients are sums that cancel, the rounding of v and beta alone costs more."""
    from palimpsa_kernels.triton import mixing_scan

    inputs = mixing_inputs(dtype=torch.bfloat16, initial=False, importance=importance, strength=strength)
    expected = mixing_results(mixing_definition, inputs, dtype=torch.float64)
    errors = mixing_errors(mixing_results(mixing_scan, inputs, device=DEVICE), expected)
    composed = mixing_errors(mixing_results(composed_scan, inputs), expected)
    wrong = {n: (e, composed[n]) for n, e in errors.items() if not e <= max(5e-3, 1.5 * composed[n])}
    assert not wrong, wrong


def test_neither_v_nor_beta_is_kept_for_the_backward_pass() -> None:
    from palimpsa_kernels.triton import mixing_scan

    leaves = {name: x.to(DEVICE).requires_grad_() for name, x in mixing_inputs(initial=False, tokens=5).items()}
    y, _ = call_mixing(mixing_scan, leaves, cu_seqlens=None)
    given = {x.data_ptr() for x in leaves.values()}
    kept = [x for x in y.grad_fn.saved_tensors if x is not None and x.data_ptr() not in given]
    assert [x for x in kept if x.shape == y.shape] == []
    assert kept  # the states, at least


def test_inputs_that_are_apart_in_memory() -> None:
    """dt and strength as slices of one projection with others, x and the logits too."""
    from palimpsa_kernels.triton import mixing_scan

    inputs = mixing_inputs(initial=False, tokens=6, strength=True)
    plain = {name: x.to(DEVICE) for name, x in inputs.items()}
    heads, value_dim = plain["x"].shape[2:]
    joint = torch.cat([plain["x"].flatten(2), plain["logits"].flatten(2), plain["dt"], plain["strength"]], 2)
    x, logits, dt, strength = joint.split([heads * value_dim, heads * value_dim, heads, heads], 2)
    by_head = {"x": x.unflatten(2, (heads, -1)), "logits": logits.unflatten(2, (heads, -1))}
    apart = plain | by_head | {"dt": dt, "strength": strength}
    results = []
    for given in (plain, apart):
        leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
        y, _ = call_mixing(mixing_scan, leaves, cu_seqlens=None)
        y.sum().backward()
        results.append([y.detach(), *(t.grad for t in leaves.values())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_small_steps_keep_their_relative_precision() -> None:
    """softplus of numbers far below zero, where log(1 + exp) has lost all digits in fp32."""
    from palimpsa_kernels.triton.activations import Raw, activate

    raw = torch.linspace(-30, 30, 61).view(1, 61, 1)
    zero, one = torch.zeros(1), torch.ones(1, 61, 1, 1)
    inputs = Raw(*(x.to(DEVICE) for x in (one, raw)), None, None, *(x.to(DEVICE) for x in (zero, zero - 9, zero)), None)
    value, _, log_alpha = activate(inputs)
    expected = torch.logaddexp(raw.double(), torch.zeros_like(raw.double())).flatten()
    torch.testing.assert_close(value.flatten().double().cpu(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(log_alpha.flatten().double().cpu(), -expected * torch.tensor(-9.0).double().exp(),
                               rtol=1e-5, atol=0)  # fmt: skip


def test_decay_stronger_than_the_scan_takes_is_limited_and_gives_no_gradient() -> None:
    from palimpsa_kernels.triton.activations import Raw, activate, activation_gradients

    x, dt = torch.ones(1, 3, 2, 4), torch.tensor([[[1.0, 60.0], [2.0, 1.0], [60.0, 1.0]]])
    zero, rate = torch.zeros(2), torch.full((2,), 2.0).log()
    raw = Raw(x.to(DEVICE), dt.to(DEVICE), None, None, zero.to(DEVICE), rate.to(DEVICE), zero.to(DEVICE), None)
    _, _, log_alpha = activate(raw)
    step = torch.logaddexp(dt, torch.zeros_like(dt))
    torch.testing.assert_close(log_alpha.cpu(), (-2 * step).clamp(min=-100))
    gradients = activation_gradients(raw, torch.zeros_like(raw.x), None, torch.ones_like(raw.dt), None)
    inside = (dt < 50).float()
    torch.testing.assert_close(gradients.dt.cpu(), -2 * torch.sigmoid(dt) * inside)
    torch.testing.assert_close(gradients.A_log.cpu(), (-2 * step * inside).sum((0, 1)))
