"""causal_conv1d against the float64 reference and against torch's own convolution."""

import pytest
import torch
import torch.nn.functional as F
from helpers.kernel_cases import differentiable, offsets, relative_error, with_gradients
from palimpsa_kernels import causal_conv1d, causal_conv1d_step
from palimpsa_kernels.reference import causal_conv1d_reference


def make_inputs(tokens, dim=6, width=4, *, batch=1, states=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    return {
        "x": normal(batch, tokens, dim).to(dtype),
        "weight": normal(dim, width),
        "bias": normal(dim),
        "state": normal(states, dim, width - 1).to(dtype),
    }


def results(function, inputs, *, dtype=None, **arguments):
    leaves = differentiable(inputs, dtype)
    y, state = function(
        leaves["x"], leaves["weight"], leaves.get("bias"), initial_state=leaves.get("state"), **arguments
    )
    return with_gradients({"y": y, "state": state}, leaves)


def compare_with_reference(inputs, bound, **arguments):
    expected = results(causal_conv1d_reference, inputs, dtype=torch.float64, **arguments)
    actual = results(causal_conv1d, inputs, output_final_state=True, **arguments)
    for name, x in expected.items():
        assert relative_error(actual[name], x) <= bound, name


@pytest.mark.parametrize("borders", [(0, 30), (0, 1, 3, 6, 10, 30), (0, 0, 10, 10, 30, 30), (0, 2, 25), (0, 0)])
@pytest.mark.parametrize("activation", ["silu", None])
def test_every_output_and_gradient_of_packed_rows(borders, activation):
    inputs = make_inputs(30, states=len(borders) - 1)
    compare_with_reference(inputs, 1e-6, activation=activation, cu_seqlens=offsets(*borders))


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1, 2, 30])
@pytest.mark.parametrize("left_out", [(), ("bias",), ("state",)])
def test_every_output_and_gradient_of_batches(width, tokens, left_out):
    inputs = make_inputs(tokens, width=width, batch=2, states=2)
    compare_with_reference({name: x for name, x in inputs.items() if name not in left_out}, 1e-6)


def test_bfloat16_input_with_float32_weights():
    inputs = make_inputs(30, dtype=torch.bfloat16)
    compare_with_reference(inputs, 5e-3)
    y, state = causal_conv1d(inputs["x"], inputs["weight"], inputs["bias"], output_final_state=True)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.bfloat16)


def test_equals_torchs_depthwise_convolution():
    inputs = make_inputs(30, batch=2)
    padded = F.pad(inputs["x"].mT, (3, 0))
    expected = F.silu(F.conv1d(padded, inputs["weight"][:, None], inputs["bias"], groups=6)).mT
    y = causal_conv1d(inputs["x"], inputs["weight"], inputs["bias"])
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [3.0, torch.nan])
def test_a_document_does_not_reach_the_next_one(value):
    inputs = make_inputs(30, states=2)
    changed = {**inputs, "x": inputs["x"].clone()}
    changed["x"][:, 9] = value
    before, after = (
        results(causal_conv1d, x, output_final_state=True, cu_seqlens=offsets(0, 10, 30)) for x in (inputs, changed)
    )
    assert not torch.equal(before["y"][:, 9], after["y"][:, 9])
    for name in ("y", "dx"):
        assert torch.equal(before[name][:, 10:], after[name][:, 10:]), name
    for name in ("state", "dstate"):
        assert torch.equal(before[name][1], after[name][1]), name


def test_padding_is_not_read_and_takes_no_gradient():
    inputs = make_inputs(30)
    inputs["x"][:, 20:] = torch.nan
    found = results(causal_conv1d, inputs, output_final_state=True, cu_seqlens=offsets(0, 20))
    for name, x in found.items():
        assert x.isfinite().all(), name
    assert not found["y"][:, 20:].any()
    assert not found["dx"][:, 20:].any()


def test_decoding_step_by_step_equals_the_whole():
    inputs = make_inputs(12, batch=2, states=2)
    state = inputs["state"].clone()
    weights = (inputs["weight"], inputs["bias"])
    y, final = causal_conv1d(inputs["x"], *weights, initial_state=state, output_final_state=True)
    steps = [causal_conv1d_step(inputs["x"][:, t], state, *weights) for t in range(12)]
    torch.testing.assert_close(torch.stack(steps, 1), y, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, final, rtol=0, atol=0)
