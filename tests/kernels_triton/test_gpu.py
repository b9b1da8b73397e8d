"""Every shape, dtype, decay and layout of the contract on a GPU against float64: outputs, states and all gradients.

Runs by itself on a machine without the rest of the project's dependencies:

    PYTHONPATH=kernels:tests python -m pytest -m gpu --noconftest -c /dev/null -p no:cacheprovider tests/kernels_triton

Compiling takes most of the time, so the scans' cases run in several processes.
"""

import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace

import pytest
import torch
from helpers.triton_cases import DECAYS, DEVICE, Case, make_inputs, wrong_results

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PROCESSES = min(8, os.cpu_count() or 1)
LAYOUTS = {
    "row": Case(tokens=333, heads=4, groups=1, chunk_size=64),
    "rows, a group a head": Case(batch=3, tokens=150, heads=4, groups=4, initial=False, chunk_size=None),
    "packed, padding": Case(tokens=320, heads=4, groups=2, offsets=(0, 0, 65, 65, 192, 300), chunk_size=128),
    "packed": Case(tokens=257, heads=8, groups=1, offsets=(0, 1, 2, 130, 257, 257), initial=False, chunk_size=None),
    "one token": Case(batch=2, tokens=1, heads=8, groups=2, chunk_size=None),
    "long chunks": Case(tokens=700, heads=4, groups=1, chunk_size=512),
    "small priors": Case(tokens=333, heads=4, groups=1, initial=False, chunk_size=None, smallest_prior=0.01),
}
SIZES = {
    (128, 64): [(BF16, "row"), (BF16, "packed, padding"), (FP32, "packed"), (FP16, "rows, a group a head")],
    (64, 64): [(BF16, "small priors"), (FP32, "small priors")],
    (96, 192): [(BF16, "rows, a group a head"), (FP32, "packed, padding"), (BF16, "packed")],
    (48, 96): [(BF16, "packed"), (FP32, "rows, a group a head"), (FP16, "packed, padding")],
    (16, 16): [(BF16, "one token"), (FP32, "long chunks"), (FP16, "packed")],
    (192, 48): [(BF16, "packed, padding"), (FP32, "row")],
    (256, 256): [(BF16, "row"), (FP32, "packed"), (FP16, "one token")],
    (16, 256): [(BF16, "long chunks"), (FP32, "one token")],
    (256, 16): [(BF16, "rows, a group a head"), (FP32, "row")],
    (72, 100): [(BF16, "packed"), (FP32, "packed, padding")],
}
CASES = {
    f"K {k}, V {v}, {str(dtype).removeprefix('torch.')}, {layout}": replace(
        LAYOUTS[layout], key_dim=k, value_dim=v, dtype=dtype, decays=DECAYS
    )
    for (k, v), combinations in SIZES.items()
    for dtype, layout in combinations
}
SCANS = ("palimpsa", "ssd")
Results = dict[tuple[str, str], Future[dict[str, float]]]


@pytest.fixture(scope="module")
def results() -> Iterator[Results]:
    """What is wrong with each case of each scan, worked out side by side."""
    pool = ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn"))
    yield {
        (name, scan): pool.submit(wrong_results, case, ssd=scan == "ssd")
        for name, case in CASES.items()
        for scan in SCANS
    }
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scan", SCANS)
def test_scan(results: Results, name: str, scan: str) -> None:
    wrong = results[name, scan].result(timeout=300)
    assert not wrong, wrong


def test_gradients_repeat_bit_for_bit() -> None:
    from palimpsa_kernels.triton import chunk_palimpsa, chunk_ssd

    inputs, _ = make_inputs(replace(LAYOUTS["row"], heads=8, key_dim=128, value_dim=64, dtype=BF16, decays=DECAYS))
    for scan, names in ((chunk_palimpsa, ("q", "k", "v", "beta", "log_alpha", "prior")), (chunk_ssd, SSD_NAMES)):
        runs = []
        for _ in range(3):
            leaves = [inputs[name].clone().requires_grad_() for name in names]
            y = scan(*leaves)
            y.backward(torch.ones_like(y))
            runs.append([y.detach(), *(x.grad for x in leaves)])
        assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


SSD_NAMES = ("q", "k", "v", "log_alpha")


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_large_states_and_every_decay_stay_finite(dtype: torch.dtype) -> None:
    """States up to 1e30 next to evidence of nothing, decays from 0 to -100 a step."""
    from palimpsa_kernels.triton import chunk_palimpsa

    inputs, _ = make_inputs(Case(tokens=300, heads=4, key_dim=128, value_dim=64, dtype=dtype, initial=False))
    inputs["v"] = (inputs["v"].float() * 1e25).to(dtype)
    inputs["beta"][:, :150] = 0
    inputs["log_alpha"] = torch.tensor([0.0, -1e-6, -30.0, -100.0], device=DEVICE).expand(1, 300, 4).contiguous()
    leaves = [x.clone().requires_grad_() for x in inputs.values()]
    y = chunk_palimpsa(*leaves, chunk_size=64)
    (y.float() * 1e-20).sum().backward()
    for name, x in zip(("y", *inputs), (y, *(leaf.grad for leaf in leaves)), strict=True):
        assert bool(torch.isfinite(x).all()), name


def test_more_elements_than_fit_into_31_bits() -> None:
    """A last document far behind the first gives what it gives alone, in output and gradients."""
    from palimpsa_kernels.triton import chunk_palimpsa, chunk_ssd

    heads, value_dim, last, tokens = 80, 128, 100, 2**31 // (80 * 128) + 300

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, *shape, device=DEVICE, dtype=BF16)

    inputs = {"q": some(1, 16), "k": some(1, 16), "v": some(heads, value_dim)}
    inputs["beta"] = inputs["v"].abs()
    inputs["log_alpha"] = -0.1 * torch.rand(1, tokens, heads, device=DEVICE)
    inputs["prior"] = torch.ones(heads, device=DEVICE)
    far = torch.tensor([0, tokens - last, tokens], dtype=torch.int32, device=DEVICE)
    alone = torch.tensor([0, last], dtype=torch.int32, device=DEVICE)

    def results_of(function, inputs: dict[str, torch.Tensor], offsets: torch.Tensor, **options) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_(name != "prior") for name, x in inputs.items()]
        y = function(*leaves, cu_seqlens=offsets, **options)
        y.backward(torch.ones_like(y))
        found = [x[:, -last:].clone() for x in (y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None))]
        for leaf in leaves:
            leaf.grad = None
        return found

    for function, names, options in (
        (chunk_ssd, SSD_NAMES, {}),
        (chunk_palimpsa, tuple(inputs), {"chunk_size": 64}),
    ):
        whole = {name: inputs[name] for name in names}
        part = {name: x if name == "prior" else x[:, -last:].clone() for name, x in whole.items()}
        expected = results_of(function, part, alone, **options)
        for x, reference in zip(results_of(function, whole, far, **options), expected, strict=True):
            assert torch.equal(x, reference)


def test_a_new_length_compiles_nothing() -> None:
    from palimpsa_kernels.triton import chunk_palimpsa, chunk_ssd
    from triton.runtime.jit import JITFunction

    modules = [module for name, module in sys.modules.items() if name.startswith("palimpsa_kernels.triton.")]
    kernels = {id(x): x for module in modules for x in vars(module).values() if isinstance(x, JITFunction)}

    def compiled(tokens: int) -> int:
        inputs, _ = make_inputs(Case(tokens=tokens, heads=4, dtype=BF16, initial=False))
        leaves = [x.clone().requires_grad_() for x in inputs.values()]
        chunk_palimpsa(*leaves).sum().backward()
        chunk_ssd(*(leaf for name, leaf in zip(inputs, leaves, strict=True) if name in SSD_NAMES)).sum().backward()
        device = torch.cuda.current_device()
        return sum(len(kernel.device_caches[device][0]) for kernel in kernels.values())

    first = compiled(256)
    assert first >= 16
    assert [compiled(tokens) for tokens in (640, 77, 1, 4096, 5000)] == [first] * 5
