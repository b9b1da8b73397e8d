"""Input checks of the public functions."""

import re

import palimpsa_kernels
import pytest
import torch
from helpers.kernel_cases import PALIMPSA_INPUTS, SSD_INPUTS, make_inputs, offsets


def scan(changes, **arguments):
    inputs = make_inputs(20) | changes
    return palimpsa_kernels.chunk_palimpsa(*(inputs[name] for name in PALIMPSA_INPUTS), **arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(1, 20, 8)}, "q has 3 dimensions, expected 4"),
        ({"q": torch.zeros(1, 20, 3, 8)}, "number of groups G = 3 must divide the heads H = 4"),
        ({"k": torch.zeros(1, 20, 2, 9)}, "k has shape (1, 20, 2, 9), expected (1, 20, 2, 8)"),
        ({"v": torch.zeros(1, 21, 4, 6)}, "v has shape (1, 21, 4, 6), expected (1, 20, 4, 6)"),
        ({"beta": torch.zeros(1, 20, 4, 1)}, "beta has shape (1, 20, 4, 1), expected (1, 20, 4, 6)"),
        ({"log_alpha": torch.zeros(1, 20, 2)}, "log_alpha has shape (1, 20, 2), expected (1, 20, 4)"),
        ({"prior": torch.ones(2)}, "prior has shape (2,), expected (4,)"),
        ({"prior": torch.zeros(4)}, "prior must be positive"),
        ({"q": torch.zeros(1, 20, 2, 8, dtype=torch.float64)}, "q has dtype torch.float64, expected one of"),
        ({"v": torch.zeros(1, 20, 4, 6).bfloat16()}, "v has dtype torch.bfloat16, but q has torch.float32"),
        ({"log_alpha": torch.zeros(1, 20, 4).bfloat16()}, "log_alpha has dtype torch.bfloat16, expected torch.float32"),
        ({"v": torch.zeros(1, 20, 4, 6, device="meta")}, "v is on meta, but q is on cpu"),
        ({"q": None}, "q is of type NoneType, expected a tensor"),
        ({"beta": None}, "beta is of type NoneType, expected a tensor"),
        ({"v": torch.zeros(1, 20, 0, 6)}, "number of groups G = 2 must divide the heads H = 0"),
        ({"v": torch.zeros(1, 20, 4, 0)}, "V must be at least 1"),
        ({"q": torch.zeros(1, 20, 2, 0)}, "K must be at least 1"),
        ({"beta": torch.full((1, 20, 4, 6), -1e-3)}, "beta must not be negative"),
        ({"log_alpha": torch.full((1, 20, 4), 0.5)}, "log_alpha must lie in [-100, 0], but holds [0.5]"),
        ({"log_alpha": torch.full((1, 20, 4), -torch.inf)}, "log_alpha must lie in [-100, 0], but holds [-inf]"),
    ],
)
def test_inputs_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        scan(changes)


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        (torch.tensor([0, 20]), "cu_seqlens has dtype torch.int64, expected torch.int32"),
        (offsets(0), "cu_seqlens has shape (1,), expected [N + 1] with N >= 1"),
        (offsets(1, 20), "cu_seqlens must start at 0, not 1"),
        (offsets(0, 9, 7, 20), "cu_seqlens must not decrease"),
        (offsets(0, 21), "cu_seqlens ends at 21, behind the row's 20 tokens"),
    ],
)
def test_offsets_that_do_not_fit(cu_seqlens, message):
    inputs = make_inputs(20)
    with pytest.raises(ValueError, match=re.escape(message)):
        scan({}, cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match=re.escape(message)):
        palimpsa_kernels.chunk_ssd(*(inputs[name] for name in SSD_INPUTS), cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match=re.escape(message)):
        palimpsa_kernels.causal_conv1d(torch.zeros(1, 20, 3), torch.zeros(3, 4), None, cu_seqlens=cu_seqlens)


def test_offsets_that_are_no_tensor():
    with pytest.raises(ValueError, match="cu_seqlens is of type list, expected a tensor"):
        scan({}, cu_seqlens=[0, 20])


@pytest.mark.parametrize("chunk_size", [0, 2.5])
def test_chunk_sizes_that_are_none(chunk_size):
    with pytest.raises(ValueError, match=f"chunk_size must be a positive integer, not {chunk_size}"):
        scan({}, chunk_size=chunk_size)


def test_values_out_of_range_are_refused_by_every_function_that_takes_them():
    inputs = make_inputs(20)
    growing = inputs | {"log_alpha": torch.ones(1, 20, 4)}
    token = {name: x[:, 0] for name, x in growing.items() if name not in ("prior", "M", "Ibar")}
    state = torch.zeros(1, 4, 6, 8)
    with pytest.raises(ValueError, match="log_alpha must lie in"):
        palimpsa_kernels.chunk_ssd(*(growing[name] for name in SSD_INPUTS))
    with pytest.raises(ValueError, match="log_alpha must lie in"):
        palimpsa_kernels.palimpsa_step(**token, prior=inputs["prior"], states=(state, state))
    with pytest.raises(ValueError, match="log_alpha must lie in"):
        palimpsa_kernels.ssd_step(*(token[name] for name in SSD_INPUTS), state)
    with pytest.raises(ValueError, match="prior must be positive"):
        palimpsa_kernels.palimpsa_step(**token, prior=torch.zeros(4), states=(state, state))


def test_packed_documents_need_a_single_row():
    with pytest.raises(ValueError, match="B must be 1, not 2"):
        scan(make_inputs(20, batch=2), cu_seqlens=offsets(0, 20))


def test_states_that_do_not_fit():
    state = torch.zeros(1, 4, 6, 8)
    with pytest.raises(ValueError, match="initial Ibar has shape"):
        scan({}, initial_state=(state, torch.zeros(1, 4, 8, 6)))
    with pytest.raises(ValueError, match="initial M has dtype"):
        scan({}, initial_state=(state.bfloat16(), state))
    with pytest.raises(ValueError, match=re.escape("initial M has shape (1, 4, 6, 8), expected (2, 4, 6, 8)")):
        scan({}, initial_state=(state, state), cu_seqlens=offsets(0, 10, 20))
    with pytest.raises(ValueError, match=re.escape("initial_state must be the pair (M, Ibar), not 1 tensors")):
        scan({}, initial_state=(state,))
    with pytest.raises(ValueError, match=re.escape("initial_state must be the pair (M, Ibar), not of type Tensor")):
        scan({}, initial_state=state)
    inputs = make_inputs(20)
    token = {name: x[:, 0] for name, x in inputs.items() if name not in ("prior", "M", "Ibar")}
    with pytest.raises(ValueError, match="Ibar has shape"):
        palimpsa_kernels.palimpsa_step(**token, prior=inputs["prior"], states=(state, state[..., :7]))
    with pytest.raises(ValueError, match="states must be the pair"):
        palimpsa_kernels.palimpsa_step(**token, prior=inputs["prior"], states=(state,))
    with pytest.raises(ValueError, match="state has dtype"):
        palimpsa_kernels.ssd_step(*(token[name] for name in SSD_INPUTS), state.half())


@pytest.mark.parametrize(
    ("weight", "bias", "activation", "message"),
    [
        (torch.zeros(3), None, "silu", "weight has shape (3,), expected [D, W]"),
        (torch.zeros(4, 4), None, "silu", "weight has shape (4, 4), expected (3, 4)"),
        (torch.zeros(3, 4).half(), None, "silu", "weight has dtype torch.float16"),
        (torch.zeros(3, 4), torch.zeros(4), "silu", "bias has shape (4,), expected (3,)"),
        (torch.zeros(3, 4), None, "relu", "activation is 'relu'"),
    ],
)
def test_convolutions_that_do_not_fit(weight, bias, activation, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        palimpsa_kernels.causal_conv1d(torch.zeros(1, 20, 3), weight, bias, activation=activation)
    with pytest.raises(ValueError, match=re.escape(message)):
        palimpsa_kernels.causal_conv1d_step(
            torch.zeros(1, 3), torch.zeros(1, 3, 3), weight, bias, activation=activation
        )


def test_windows_that_do_not_fit():
    with pytest.raises(ValueError, match="state has shape"):
        palimpsa_kernels.causal_conv1d_step(torch.zeros(1, 3), torch.zeros(1, 3, 4), torch.zeros(3, 4), None)
