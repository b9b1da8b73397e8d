"""The gated norm from PyTorch operations against its definition."""

import pytest
import torch
from helpers.norm_cases import CASES, norm_definition, norm_errors, norm_inputs, norm_results
from palimpsa_kernels import gated_rms_norm


@pytest.mark.parametrize("case", CASES)
def test_against_the_definition(case):
    inputs = norm_inputs()
    expected = norm_results(norm_definition, inputs, case, dtype=torch.float64, pieces=False)
    errors = norm_errors(norm_results(gated_rms_norm, inputs, case), expected)
    assert max(errors.values()) <= 1e-6, errors


def test_what_does_not_fit_is_named():
    x, z, weight = norm_inputs().values()
    with pytest.raises(ValueError, match="24 channels are no multiple of groups of 7"):
        gated_rms_norm(x, z, weight, eps=0.1, group_size=7)
    with pytest.raises(ValueError, match="z has shape"):
        gated_rms_norm(x, z[:1], weight, eps=0.1, group_size=8)
    with pytest.raises(ValueError, match=r"\[3, 4\] do not sum to 24"):
        gated_rms_norm(x, z, weight, eps=0.1, group_size=8, segments=[3, 4], total=lambda s: s)
    with pytest.raises(ValueError, match="go together"):
        gated_rms_norm(x, z, weight, eps=0.1, group_size=8, segments=[24])
    with pytest.raises(ValueError, match=r"\[25, -1\] are negative in places"):
        gated_rms_norm(x, z, weight, eps=0.1, group_size=8, segments=[25, -1], total=lambda s: s)
    with pytest.raises(ValueError, match="group_size must be positive, not 0"):
        gated_rms_norm(x, z, weight, eps=0.1, group_size=0)
    with pytest.raises(ValueError, match=r"z has dtype torch.float64, expected one of"):
        gated_rms_norm(x, z.double(), weight, eps=0.1, group_size=8)
    with pytest.raises(ValueError, match="z is on meta, but x is on cpu"):
        gated_rms_norm(x, z.to("meta"), weight, eps=0.1, group_size=8)
    with pytest.raises(ValueError, match="x has 0 dimensions"):
        gated_rms_norm(x[0, 0, 0], None, weight, eps=0.1, group_size=8)
