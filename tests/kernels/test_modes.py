"""What runs around the functions: autocast, second derivatives, batches without rows."""

import palimpsa_kernels
import pytest
import torch
from helpers.kernel_cases import PALIMPSA_INPUTS, SSD_INPUTS, differentiable, make_inputs
from palimpsa_kernels import HeadParameters, Importance
from palimpsa_kernels.reference import palimpsa_reference, ssd_reference


def palimpsa(leaves):
    return palimpsa_kernels.chunk_palimpsa(*(leaves[name] for name in PALIMPSA_INPUTS))


def ssd(leaves):
    return palimpsa_kernels.chunk_ssd(*(leaves[name] for name in SSD_INPUTS))


def mixing(leaves):
    heads = HeadParameters(*(0.1 * leaves["prior"] for _ in range(3)))
    importance = Importance(leaves["beta"], leaves["prior"], leaves["prior"].detach())
    y, _ = palimpsa_kernels.mixing_scan(
        leaves["q"], leaves["k"], leaves["v"], leaves["log_alpha"], heads, importance, output_final_state=True
    )
    return y


SCANS = {"palimpsa": (palimpsa, PALIMPSA_INPUTS), "ssd": (ssd, SSD_INPUTS)}


@pytest.mark.parametrize("name", SCANS)
def test_autocast_changes_no_bit(name):
    scan, names = SCANS[name]

    def results():
        leaves = differentiable(make_inputs())
        y = scan(leaves)
        y.square().sum().backward()
        return [y.detach(), *(leaves[name].grad for name in names)]

    plain = results()
    with torch.autocast("cpu", torch.bfloat16):
        inside = results()
    assert all(torch.equal(a, b) for a, b in zip(inside, plain, strict=True))
    reference = palimpsa_reference if name == "palimpsa" else ssd_reference
    expected, _ = reference(*(make_inputs()[name] for name in names))
    assert (inside[0] - expected).norm() < 1e-6 * expected.norm()


def test_autocast_leaves_the_layers_scan_as_it_is():
    inputs = make_inputs()
    plain = mixing(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mixing(inputs), plain)


@pytest.mark.parametrize("scan", [palimpsa, ssd, mixing])
def test_second_derivatives_are_refused_and_not_left_out(scan):
    leaves = differentiable(make_inputs())
    y = scan(leaves)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(y.sum(), leaves["v"], create_graph=True)
    [once] = torch.autograd.grad(scan(leaves).sum(), leaves["v"])
    assert once.isfinite().all()


@pytest.mark.parametrize("scan", [palimpsa, ssd, mixing])
def test_a_batch_without_rows(scan):
    inputs = make_inputs()
    leaves = differentiable({name: x if name == "prior" else x[:0] for name, x in inputs.items()})
    y = scan(leaves)
    assert y.shape == (0, 50, 4, 6)
    y.sum().backward()
    assert leaves["v"].grad.shape == (0, 50, 4, 6)
    assert not leaves["prior"].grad.any() if scan is palimpsa else True


def test_a_convolution_of_no_rows():
    y, state = palimpsa_kernels.causal_conv1d(
        torch.zeros(0, 5, 3), torch.ones(3, 4), None, initial_state=torch.zeros(0, 3, 3), output_final_state=True
    )
    assert y.shape == (0, 5, 3)
    assert state.shape == (0, 3, 3)
