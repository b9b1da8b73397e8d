"""The gated norm's kernels against its definition in float64: outputs and every gradient."""

import pytest
import torch
from helpers.norm_cases import CASES, norm_definition, norm_errors, norm_inputs, norm_results

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("case", "dtype", "bound"),
    [(case, torch.float32, 1e-6) for case in CASES] + [("groups", torch.bfloat16, 4e-3)],
)
def test_against_the_definition(case: str, dtype: torch.dtype, bound: float) -> None:
    from palimpsa_kernels.triton import gated_rms_norm

    def kernels(x, z, weight, segments=None, total=None, **options):
        return gated_rms_norm(x, z, weight, segments=segments, total=total, **options)

    inputs = norm_inputs(rows=(3, 13), dtype=dtype)
    expected = norm_results(norm_definition, inputs, case, dtype=torch.float64, pieces=False)
    errors = norm_errors(norm_results(kernels, inputs, case, device=DEVICE), expected)
    assert max(errors.values()) <= bound, errors


def test_wide_groups_and_rows_that_are_apart() -> None:
    """A group wider than what small programs hold, x a slice of a projection, z dense and in another dtype."""
    from palimpsa_kernels.triton import gated_rms_norm

    generator = torch.Generator().manual_seed(0)
    joint = torch.randn(3, 2 * 5000, generator=generator).to(DEVICE)
    weight = torch.randn(5000, generator=generator).to(DEVICE)
    x, z = joint[:, :5000], joint[:, 5000:].bfloat16()
    y = gated_rms_norm(x, z, weight, eps=1e-5, group_size=5000, segments=None, total=None)
    expected = norm_definition(x.double(), z.double(), weight.double(), eps=1e-5, group_size=5000)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
