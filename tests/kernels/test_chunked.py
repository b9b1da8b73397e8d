"""chunk_palimpsa in chunks against the float64 recurrence."""

from itertools import pairwise

import pytest
import torch
from helpers.kernel_cases import (
    PALIMPSA_INPUTS,
    assert_close,
    make_inputs,
    offsets,
    palimpsa_results,
    part_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from palimpsa_kernels import chunk_palimpsa, chunk_ssd, chunked, palimpsa_step
from palimpsa_kernels.reference import palimpsa_reference

FP32_BOUND, HALF_BOUND = 1e-5, 5e-3
PACKINGS = {
    "one document": (0, 61),
    "borders inside chunks": (0, 5, 37, 61),
    "borders at chunks": (0, 32, 61),
    "empty documents": (0, 0, 20, 20, 20, 61, 61),
    "single tokens": (0, 1, 2, 3, 61),
    "tail": (0, 20, 41),
    "only padding": (0, 0),
}


def compare_with_reference(inputs, bound, *, initial=True, **arguments):
    shared = {name: arguments[name] for name in ("scale", "cu_seqlens") if name in arguments}
    expected = palimpsa_results(palimpsa_reference, inputs, dtype=torch.float64, initial=initial, **shared)
    actual = palimpsa_results(chunk_palimpsa, inputs, initial=initial, output_final_state=True, **arguments)
    assert_close(actual, expected, bound)


@pytest.fixture
def poisoned_memory():
    """Fresh memory holds NaN, so that whatever reads it shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.usefixtures("poisoned_memory")
def test_every_output_and_gradient_of_packed_rows(packing):
    inputs = make_inputs(61, states=len(PACKINGS[packing]) - 1)
    compare_with_reference(inputs, FP32_BOUND, scale=0.7, cu_seqlens=offsets(*PACKINGS[packing]))


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 200])
@pytest.mark.usefixtures("poisoned_memory")
def test_every_output_and_gradient_of_batches(tokens):
    compare_with_reference(make_inputs(tokens, batch=2, states=2), FP32_BOUND)


@pytest.mark.parametrize(
    ("groups", "heads", "key_dim", "value_dim"), [(1, 8, 16, 32), (4, 4, 7, 5), (1, 2, 48, 96), (2, 2, 1, 1)]
)
def test_shapes(groups, heads, key_dim, value_dim):
    compare_with_reference(make_inputs(40, groups, heads, key_dim, value_dim), FP32_BOUND)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs(dtype):
    inputs = make_inputs(61, states=3, dtype=dtype)
    compare_with_reference(inputs, HALF_BOUND, cu_seqlens=offsets(0, 20, 41, 58))
    y, (mean, importance) = chunk_palimpsa(*(inputs[name] for name in PALIMPSA_INPUTS), output_final_state=True)
    assert (y.dtype, mean.dtype, importance.dtype) == (dtype, torch.float32, torch.float32)


def test_states_start_at_zero():
    compare_with_reference(make_inputs(40), FP32_BOUND, initial=False)


@pytest.mark.parametrize("chunk_size", [1, 5, 64])
def test_chunk_sizes(chunk_size):
    compare_with_reference(make_inputs(40), FP32_BOUND, chunk_size=chunk_size)


def test_many_segments(monkeypatch):
    """States and adjoints are carried from segment to segment, across and at borders of documents."""
    monkeypatch.setattr(chunked, "SEGMENT_ELEMENTS", 1)
    compare_with_reference(make_inputs(90, states=3), FP32_BOUND, cu_seqlens=offsets(0, 40, 48, 90), chunk_size=4)


@pytest.mark.parametrize("log_alpha", [0.0, -1e-6, -16.0, -87.0, -100.0])
def test_constant_decay(log_alpha):
    inputs = make_inputs(40)
    inputs["log_alpha"].fill_(log_alpha)
    results = palimpsa_results(chunk_palimpsa, inputs, output_final_state=True)
    expected = palimpsa_results(palimpsa_reference, inputs, dtype=torch.float64)
    if log_alpha < -80:  # below the normal numbers of fp32, next to gradients of size one
        assert results.pop("dlog_alpha").abs().max() < 1e-30
        assert results.pop("dM").abs().max() < 1e-30
        assert results.pop("dIbar").abs().max() < 1e-30
        for name in ("dlog_alpha", "dM", "dIbar"):
            del expected[name]
    assert_close(results, expected, FP32_BOUND)


def test_gradients_in_float64_by_finite_differences():
    inputs = make_inputs(7, 1, 2, 3, 2, states=2)
    inputs["log_alpha"].clamp_(min=-3)
    leaves = [x.double().requires_grad_() for x in inputs.values()]

    def scan(*tensors):
        return chunked.chunk_palimpsa(
            *tensors[:6],
            scale=0.7,
            initial_state=(tensors[6], tensors[7]),
            output_final_state=True,
            cu_seqlens=offsets(0, 4, 7),
            chunk_size=3,
        )

    torch.autograd.gradcheck(lambda *x: (lambda y, s: (y, *s))(*scan(*x)), leaves)


@settings(max_examples=25, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    tail=st.integers(0, 20),
    heads_per_group=st.integers(1, 3),
    groups=st.integers(1, 2),
    key_dim=st.integers(1, 9),
    value_dim=st.integers(1, 9),
    chunk_size=st.integers(1, 20),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_packing(lengths, tail, heads_per_group, groups, key_dim, value_dim, chunk_size, seed):
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    tokens = max(1, sum(lengths) + tail)
    inputs = make_inputs(tokens, groups, groups * heads_per_group, key_dim, value_dim, states=len(lengths), seed=seed)
    compare_with_reference(inputs, FP32_BOUND, cu_seqlens=cu_seqlens, chunk_size=chunk_size)


def test_packed_documents_equal_separate_ones():
    borders = (0, 23, 23, 55, 61)
    inputs = make_inputs(61, states=4)
    packed = palimpsa_results(chunk_palimpsa, inputs, output_final_state=True, cu_seqlens=offsets(*borders))
    dprior = 0
    generator = torch.Generator().manual_seed(1)
    upstream = {name: torch.randn(packed[name].shape, generator=generator) for name in ("y", "M", "Ibar")}
    for n, (start, end) in enumerate(pairwise(borders)):
        leaves = {
            name: (x[n : n + 1] if name in ("M", "Ibar") else x if name == "prior" else x[:, start:end])
            .clone()
            .requires_grad_()
            for name, x in inputs.items()
        }
        y, final = chunk_palimpsa(
            *(leaves[name] for name in PALIMPSA_INPUTS),
            initial_state=(leaves["M"], leaves["Ibar"]),
            output_final_state=True,
        )
        loss = (y * upstream["y"][:, start:end]).sum()
        loss += (final[0] * upstream["M"][n : n + 1]).sum() + (final[1] * upstream["Ibar"][n : n + 1]).sum()
        loss.backward()
        dprior = dprior + leaves["prior"].grad
        alone = {"y": y, "M": final[0][0], "Ibar": final[1][0]}
        alone |= {f"d{name}": leaves[name].grad for name in ("q", "k", "v", "beta", "log_alpha")}
        alone |= {"dM": leaves["M"].grad[0], "dIbar": leaves["Ibar"].grad[0]}
        together = part_of(packed, n, start, end)
        assert alone.keys() == together.keys()
        for name, x in alone.items():
            torch.testing.assert_close(together[name], x, rtol=1e-5, atol=1e-6, msg=name)
    torch.testing.assert_close(packed["dprior"], dprior, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [3.0, torch.nan])
def test_a_document_does_not_reach_the_next_one(value):
    """Bitwise, forward and backward; not even a NaN gets across."""
    inputs = make_inputs(61, states=2)
    changed = {name: x.clone() for name, x in inputs.items()}
    for name in ("q", "k", "v", "beta"):
        changed[name][:, 22] = value
    changed["log_alpha"][:, 22] = -abs(value)
    before, after = (
        palimpsa_results(chunk_palimpsa, x, output_final_state=True, cu_seqlens=offsets(0, 23, 61))
        for x in (inputs, changed)
    )
    assert not torch.equal(before["y"][:, 22], after["y"][:, 22])
    second_before, second_after = part_of(before, 1, 23, 61), part_of(after, 1, 23, 61)
    for name, x in second_before.items():
        assert torch.equal(x, second_after[name]), name


def test_padding_is_not_read_and_takes_no_gradient():
    inputs = make_inputs(61)
    for name in ("q", "k", "v", "beta", "log_alpha"):
        inputs[name][:, 41:] = torch.nan
    results = palimpsa_results(chunk_palimpsa, inputs, output_final_state=True, cu_seqlens=offsets(0, 41))
    for name, x in results.items():
        assert x.isfinite().all(), name
    for name in ("y", "dq", "dk", "dv", "dbeta", "dlog_alpha"):
        assert not results[name][:, 41:].any(), name
        assert results[name][:, :41].any(), name


def test_an_empty_document_ends_where_it_starts():
    inputs = make_inputs(20, states=2)
    results = palimpsa_results(chunk_palimpsa, inputs, output_final_state=True, cu_seqlens=offsets(0, 0, 20))
    assert torch.equal(results["M"][0], inputs["M"][0])
    assert torch.equal(results["Ibar"][0], inputs["Ibar"][0])


def test_no_tokens():
    results = palimpsa_results(chunk_palimpsa, make_inputs(0), output_final_state=True)
    assert results["y"].shape == (1, 0, 4, 6)
    assert results["dq"].shape == (1, 0, 2, 8)


def test_a_run_repeats_bitwise():
    inputs = make_inputs(61, states=3)
    first, second = (
        palimpsa_results(chunk_palimpsa, inputs, output_final_state=True, cu_seqlens=offsets(0, 20, 41, 58))
        for _ in range(2)
    )
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


def test_mamba2_is_the_limit_without_importance():
    inputs = make_inputs(61)
    inputs["beta"].zero_()
    inputs["prior"].fill_(1.0)
    scan = chunk_palimpsa(*(inputs[name] for name in PALIMPSA_INPUTS))
    ssd = chunk_ssd(inputs["q"], inputs["k"], inputs["v"], inputs["log_alpha"])
    torch.testing.assert_close(scan, ssd, rtol=1e-5, atol=1e-5)
    inputs["prior"].fill_(2.0)
    assert not torch.allclose(chunk_palimpsa(*(inputs[name] for name in PALIMPSA_INPUTS)), ssd, rtol=0.1)


def test_memory_does_not_hold_every_tokens_states():
    """What is saved for backward, inputs aside, stays far below the T * H * V * K states."""
    inputs = make_inputs(2048, 1, 8, 16, 16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        chunk_palimpsa(*(x.requires_grad_() for name, x in inputs.items() if name in PALIMPSA_INPUTS))
    own = sum(saved) - sum(inputs[name].numel() for name in PALIMPSA_INPUTS)
    assert own < 0.01 * 2048 * 8 * 16 * 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_step_by_step_equals_the_scan(dtype):
    inputs = make_inputs(37, batch=2, states=2, dtype=dtype)
    state = (inputs["M"].clone(), inputs["Ibar"].clone())
    y, final = chunk_palimpsa(
        *(inputs[name] for name in PALIMPSA_INPUTS), scale=0.7, initial_state=state, output_final_state=True
    )
    steps = [
        palimpsa_step(
            *(inputs[name][:, t] for name in PALIMPSA_INPUTS if name != "prior"), inputs["prior"], state, scale=0.7
        )
        for t in range(37)
    ]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(torch.stack(steps, 1), y, rtol=tolerance, atol=tolerance)
    assert steps[0].dtype == dtype
    for stepped, scanned in zip(state, final, strict=True):
        torch.testing.assert_close(stepped, scanned, rtol=1e-5, atol=1e-5)
