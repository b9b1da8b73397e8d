"""A step's time by parts, from the kernels that it ran."""

import pytest

from megatron_palimpsa.bench.profile import shares


def test_parts_are_shares_of_the_whole_time_and_idle_is_when_nothing_runs():
    kernels = [
        ("adjoint_kernel", 1.0, 3.0),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 2.0, 4.0),  # half of it beside the scan
        ("multi_tensor_apply_kernel<FusedAdamMathFunctor>", 5.0, 6.0),
        ("norm_gradient_kernel", 6.0, 6.5),
        ("elementwise_kernel", 6.0, 6.25),  # inside of the one before
    ]
    found = shares(reversed(kernels), 10.0)
    expected = {"scan": 0.2, "communication": 0.2, "optimizer": 0.1, "norm": 0.05, "other": 0.025, "idle": 0.55}
    assert {part: share for part, share in found.items() if share} == pytest.approx(expected)
