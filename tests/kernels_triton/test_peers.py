"""On a GPU: our kernels around the scan, and importable peers, at real widths, against the definitions in float64."""

import importlib.util

import pytest
import torch
from helpers.mixing_cases import mixing_definition, mixing_errors, mixing_inputs, mixing_results
from helpers.norm_cases import norm_definition
from palimpsa_kernels import causal_conv1d, gated_rms_norm, mixing_scan
from palimpsa_kernels.dispatch import VARIABLE
from palimpsa_kernels.mixing import composed
from palimpsa_kernels.peers import PEERS
from palimpsa_kernels.reference import causal_conv1d_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
OFFSETS = (0, 0, 65, 65, 192, 287)


def installed(function: str) -> list[str]:
    return [name for name in PEERS[function] if importlib.util.find_spec(name) is not None]


@pytest.mark.parametrize("offsets", [None, OFFSETS], ids=["rows", "packed"])
@pytest.mark.parametrize(
    ("kernel", "importance", "strength"),
    [
        ("own", True, False),
        ("own", True, True),
        ("own", False, True),
        *((name, False, False) for name in ["own", *installed("mamba2_scan")]),
    ],
)
def test_scan(
    kernel: str,
    importance: bool,
    strength: bool,
    offsets: tuple[int, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, kernel)
    inputs = mixing_inputs(
        tokens=300,
        key_dim=128,
        value_dim=64,
        dtype=torch.bfloat16,
        initial=False,
        importance=importance,
        strength=strength,
    )

    def without_states(scan):
        def run(*arguments, **options):
            return scan(*arguments, **{**options, "output_final_state": False})[0], ()

        return run

    def results(scan, **options):
        return mixing_results(without_states(scan), inputs, offsets=offsets, **options)

    expected = results(mixing_definition, dtype=torch.float64)
    errors = mixing_errors(results(mixing_scan, device="cuda"), expected)
    rounding = mixing_errors(results(composed), expected)
    # dv and dbeta are rounded by halves of K before sums over tokens that cancel: twice the rounding of one.
    wrong = {n: (e, rounding[n]) for n, e in errors.items() if not e <= max(5e-3, 2 * rounding[n])}
    assert not wrong, wrong


@pytest.mark.parametrize("offsets", [None, OFFSETS], ids=["rows", "packed"])
@pytest.mark.parametrize("kernel", ["own", *installed("causal_conv1d")])
def test_convolution(kernel: str, offsets: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, kernel)
    torch.manual_seed(0)
    inputs = [torch.randn(1, 300, 320), torch.randn(320, 4), torch.randn(320)]
    inputs = [x.bfloat16() for x in inputs]
    seed = torch.randn(1, 300, 320).bfloat16()
    cu_seqlens = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)

    def run(function, device: str, dtype: torch.dtype):
        leaves = [x.to(device, dtype).clone().requires_grad_() for x in inputs]
        y = function(*leaves, cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(device))
        y = y[0] if isinstance(y, tuple) else y
        y.backward(seed.to(y))
        return [y.detach().double().cpu(), *(x.grad.double().cpu() for x in leaves)]

    def reference(x, weight, bias, cu_seqlens):
        return causal_conv1d_reference(
            x, weight, bias, activation="silu", initial_state=None, cu_seqlens=cu_seqlens
        )  # fmt: skip

    expected = run(reference, "cpu", torch.float64)
    for x, e in zip(run(causal_conv1d, "cuda", torch.bfloat16), expected, strict=True):
        assert float((x - e).norm() / e.norm()) <= 5e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm_of_a_wide_layer(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(1, 100, 5120).to(dtype), torch.randn(1, 100, 5120).to(dtype), torch.randn(5120).to(dtype)]
    seed = torch.randn(1, 100, 5120).to(dtype)
    results = []
    for function, device, to in ((gated_rms_norm, "cuda", dtype), (norm_definition, "cpu", torch.float64)):
        leaves = [x.to(device, to).clone().requires_grad_() for x in inputs]
        y = function(*leaves, eps=1e-5, group_size=5120)
        y.backward(seed.to(y))
        results.append([y.detach().double().cpu(), *(x.grad.double().cpu() for x in leaves)])
    bound = 1e-5 if dtype == torch.float32 else 5e-3
    assert all(float((a - b).norm() / b.norm()) <= bound for a, b in zip(*results, strict=True))


def test_gradients_repeat_bit_for_bit() -> None:
    inputs = mixing_inputs(tokens=500, key_dim=128, value_dim=64, dtype=torch.bfloat16, initial=False)
    first, second = (mixing_results(mixing_scan, inputs, device="cuda") for _ in range(2))
    assert all(torch.equal(first[name], x) for name, x in second.items())
