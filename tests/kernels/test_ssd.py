"""chunk_ssd against the float64 recurrence."""

import pytest
import torch
from helpers.kernel_cases import SSD_INPUTS, assert_close, make_inputs, offsets, part_of, ssd_results
from hypothesis import given, settings
from hypothesis import strategies as st
from palimpsa_kernels import chunk_ssd, ssd, ssd_step
from palimpsa_kernels.reference import ssd_reference

FP32_BOUND, HALF_BOUND = 1e-5, 5e-3


def compare_with_reference(inputs, bound, *, initial=True, **arguments):
    expected = ssd_results(ssd_reference, inputs, dtype=torch.float64, initial=initial, **arguments)
    actual = ssd_results(chunk_ssd, inputs, initial=initial, output_final_state=True, **arguments)
    assert_close(actual, expected, bound)


@pytest.mark.parametrize(
    "borders", [(0, 161), (0, 5, 70, 161), (0, 64, 128, 161), (0, 0, 70, 70, 161, 161), (0, 1, 2, 100), (0, 0)]
)
def test_every_output_and_gradient_of_packed_rows(borders):
    inputs = make_inputs(161, states=len(borders) - 1)
    compare_with_reference(inputs, FP32_BOUND, scale=0.7, cu_seqlens=offsets(*borders))


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
def test_every_output_and_gradient_of_batches(tokens):
    compare_with_reference(make_inputs(tokens, batch=2, states=2), FP32_BOUND)


@pytest.mark.parametrize(
    ("groups", "heads", "key_dim", "value_dim"), [(1, 8, 16, 32), (4, 4, 7, 5), (1, 2, 48, 96), (2, 2, 1, 1)]
)
def test_shapes(groups, heads, key_dim, value_dim):
    compare_with_reference(make_inputs(80, groups, heads, key_dim, value_dim), FP32_BOUND)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs(dtype):
    inputs = make_inputs(161, states=3, dtype=dtype)
    compare_with_reference(inputs, HALF_BOUND, cu_seqlens=offsets(0, 20, 141, 158))
    y, state = chunk_ssd(*(inputs[name] for name in SSD_INPUTS), output_final_state=True)
    assert (y.dtype, state.dtype) == (dtype, torch.float32)


def test_states_start_at_zero():
    compare_with_reference(make_inputs(80), FP32_BOUND, initial=False)


def test_gradients_in_float64_by_finite_differences():
    inputs = make_inputs(7, 1, 2, 3, 2, states=2)
    leaves = [inputs[name].clamp(min=-3).double().requires_grad_() for name in (*SSD_INPUTS, "M")]

    def scan(*tensors):
        return ssd.chunk_ssd(
            *tensors[:4],
            scale=0.7,
            initial_state=tensors[4],
            output_final_state=True,
            cu_seqlens=offsets(0, 4, 7),
        )

    torch.autograd.gradcheck(scan, leaves)


@settings(max_examples=25, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 140), min_size=1, max_size=4),
    tail=st.integers(0, 20),
    heads_per_group=st.integers(1, 3),
    groups=st.integers(1, 2),
    key_dim=st.integers(1, 9),
    value_dim=st.integers(1, 9),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_packing(lengths, tail, heads_per_group, groups, key_dim, value_dim, seed):
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    tokens = max(1, sum(lengths) + tail)
    inputs = make_inputs(tokens, groups, groups * heads_per_group, key_dim, value_dim, states=len(lengths), seed=seed)
    compare_with_reference(inputs, FP32_BOUND, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("value", [3.0, torch.nan])
def test_a_document_does_not_reach_the_next_one(value):
    inputs = make_inputs(161, states=2)
    changed = {name: x.clone() for name, x in inputs.items()}
    for name in ("q", "k", "v"):
        changed[name][:, 22] = value
    changed["log_alpha"][:, 22] = -abs(value)
    before, after = (
        ssd_results(chunk_ssd, x, output_final_state=True, cu_seqlens=offsets(0, 23, 161)) for x in (inputs, changed)
    )
    assert not torch.equal(before["y"][:, 22], after["y"][:, 22])
    second_before, second_after = (part_of(x, 1, 23, 161, states=("M",)) for x in (before, after))
    for name, x in second_before.items():
        assert torch.equal(x, second_after[name]), name


def test_padding_is_not_read_and_takes_no_gradient():
    inputs = make_inputs(161)
    for name in SSD_INPUTS:
        inputs[name][:, 141:] = torch.nan
    results = ssd_results(chunk_ssd, inputs, output_final_state=True, cu_seqlens=offsets(0, 141))
    for name, x in results.items():
        assert x.isfinite().all(), name
    for name in ("y", "dq", "dk", "dv", "dlog_alpha"):
        assert not results[name][:, 141:].any(), name


def test_decoding_step_by_step_equals_the_scan():
    inputs = make_inputs(70, batch=2, states=2)
    state = inputs["M"].clone()
    y, final = chunk_ssd(
        *(inputs[name] for name in SSD_INPUTS), scale=0.7, initial_state=state, output_final_state=True
    )
    steps = [ssd_step(*(inputs[name][:, t] for name in SSD_INPUTS), state, scale=0.7) for t in range(70)]
    torch.testing.assert_close(torch.stack(steps, 1), y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, final, rtol=1e-5, atol=1e-5)
