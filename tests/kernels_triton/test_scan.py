"""The Triton kernels against the float64 recurrences: outputs, final states and every gradient.

Tiny shapes, so that they also run under the interpreter; `test_gpu` takes real ones.
"""

import pytest
import torch
from helpers.triton_cases import DECAYS, DEVICE, Case, make_inputs, relative_error, run, wrong_results
from palimpsa_kernels.reference import palimpsa_reference

pytest.importorskip("triton")


def check(case: Case, *, ssd: bool = False) -> None:
    wrong = wrong_results(case, ssd=ssd)
    assert not wrong, wrong


SMALL = {
    "all decays": Case(heads=4, decays=DECAYS),
    "half precision": Case(heads=2, decays=("weak", "mixed"), dtype=torch.bfloat16, tokens=13),
    "fp16, no initial state": Case(heads=1, dtype=torch.float16, tokens=9, initial=False),
    "packed, empty documents, padding": Case(
        heads=4, groups=2, offsets=(0, 0, 7, 7, 18), key_dim=20, value_dim=18, decays=("mixed", "weak")
    ),
    "rows": Case(batch=2, tokens=9, heads=2, groups=2, key_dim=17, decays=("medium", "strong")),
    "columns on 8 lanes": Case(
        tokens=11, heads=2, key_dim=32, value_dim=32, decays=("medium", "strong"), dtype=torch.bfloat16
    ),
    "tiles larger than the states": Case(tokens=9, heads=2, key_dim=24, value_dim=20, dtype=torch.bfloat16),
    "two tiles of keys": Case(tokens=9, heads=2, key_dim=48, decays=("weak", "strong")),
    "one token": Case(tokens=1, chunk_size=None),
    "small priors": Case(tokens=40, initial=False, chunk_size=None, smallest_prior=0.01),
    "small priors, half precision": Case(
        tokens=40, initial=False, chunk_size=None, smallest_prior=0.01, dtype=torch.bfloat16
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_palimpsa(name: str) -> None:
    check(SMALL[name])


@pytest.mark.parametrize("name", SMALL)
def test_ssd(name: str) -> None:
    check(SMALL[name], ssd=True)


def test_a_document_does_not_see_the_one_before() -> None:
    from palimpsa_kernels.triton import chunk_palimpsa

    arguments, offsets = make_inputs(Case(offsets=(0, 6, 14), tokens=14, initial=False))
    before = chunk_palimpsa(*arguments.values(), cu_seqlens=offsets, chunk_size=4)
    arguments["v"][:, 5] += 1
    after = chunk_palimpsa(*arguments.values(), cu_seqlens=offsets, chunk_size=4)
    assert not torch.equal(before[:, 5], after[:, 5])
    assert torch.equal(before[:, 6:], after[:, 6:])


def test_tokens_that_are_apart_in_memory() -> None:
    """Slices of one projection, as a layer passes them."""
    from palimpsa_kernels.triton import chunk_palimpsa

    arguments, _ = make_inputs(Case(tokens=9, heads=1))
    expected = chunk_palimpsa(*(arguments[n] for n in ("q", "k", "v", "beta", "log_alpha", "prior")))
    joint = torch.cat([arguments[n].flatten(2) for n in ("v", "k", "q")], 2)
    v, k, q = (x.unflatten(2, (1, -1)) for x in joint.split(16, 2))
    y = chunk_palimpsa(q, k, v, arguments["beta"], arguments["log_alpha"], arguments["prior"])
    assert torch.equal(y, expected)


def test_states_run_backwards_keep_more_than_bf16_at_a_documents_start() -> None:
    """They grow there by orders of magnitude; the gradients to the initial states, kept in fp32, show it."""
    from palimpsa_kernels.triton import chunk_palimpsa

    case = Case(tokens=64, heads=1, dtype=torch.bfloat16, chunk_size=64)
    inputs, _ = make_inputs(case)
    seeds = [torch.randn(shape, device=DEVICE).double() for shape in ((1, 64, 1, 16), (1, 1, 16, 16), (1, 1, 16, 16))]
    seeds[0] = seeds[0].to(case.dtype).double()
    reference = run(palimpsa_reference, {name: x.double() for name, x in inputs.items()}, None, seeds)
    result = run(chunk_palimpsa, inputs, None, seeds, output_final_state=True, chunk_size=64)
    for name in ("dM", "dIbar", "dprior"):
        assert relative_error(result[name], reference[name], 0.0) < 3e-4, name


def test_sums_behind_the_decays_gradient_are_more_exact_than_bf16() -> None:
    """What a chunk's incoming adjoint adds to dlog_alpha can cancel: its products take bf16 operands in two parts."""
    from palimpsa_kernels.triton import chunk_palimpsa

    case = Case(tokens=48, heads=1, key_dim=32, dtype=torch.bfloat16, chunk_size=16, initial=False)
    inputs, _ = make_inputs(case)
    state = torch.zeros(1, 1, 16, 32, device=DEVICE)
    seeds = [torch.randn(1, 48, 1, 16, device=DEVICE).bfloat16().double(), state, state]
    reference = run(palimpsa_reference, {name: x.double() for name, x in inputs.items()}, None, seeds)
    result = run(chunk_palimpsa, inputs, None, seeds, output_final_state=True, chunk_size=16)
    # 2e-4 with the squared keys in one part, 1e-3 with the adjoint in one.
    assert relative_error(result["dlog_alpha"], reference["dlog_alpha"], 0.0) < 5e-5


def test_gradients_are_the_same_in_every_run() -> None:
    from palimpsa_kernels.triton import chunk_palimpsa

    inputs, _ = make_inputs(Case(heads=2, decays=("weak", "mixed"), initial=False))
    results = []
    for _ in range(2):
        leaves = [x.clone().requires_grad_() for x in inputs.values()]
        chunk_palimpsa(*leaves, chunk_size=8).sum().backward()
        results.append([x.grad for x in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
