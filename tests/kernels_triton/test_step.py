"""The one-token kernels against the recurrences."""

import pytest
import torch
from helpers.triton_cases import DEVICE
from palimpsa_kernels.reference import palimpsa_reference, ssd_reference
from torch import Tensor

pytest.importorskip("triton")


def check_steps(key_dim: int, value_dim: int, dtype: torch.dtype, heads: int = 4, groups: int = 2) -> None:
    """Three tokens, state and output after each, with states in fp32 whatever the inputs' dtype."""
    from palimpsa_kernels.triton import palimpsa_step, ssd_step

    torch.manual_seed(0)
    batch, tokens = 2, 3

    def made(*shape: int) -> Tensor:
        return torch.randn(batch, tokens, *shape).to(DEVICE, dtype)

    q, k, v = made(groups, key_dim), made(groups, key_dim), made(heads, value_dim)
    beta = made(heads, value_dim).abs()
    log_alpha = -3 * torch.rand(batch, tokens, heads, device=DEVICE)
    log_alpha[:, 1, 0] = -100.0
    prior = 0.5 + torch.rand(heads, device=DEVICE)
    states = tuple(torch.rand(batch, heads, value_dim, key_dim, device=DEVICE) for _ in range(2))
    y, final = palimpsa_reference(q, k, v, beta, log_alpha, prior, scale=0.5, initial_state=states)
    y_ssd, final_ssd = ssd_reference(q, k, v, log_alpha, scale=0.5, initial_state=states[0])

    running = tuple(x.clone() for x in states)
    running_ssd = states[0].mT.contiguous().mT  # not contiguous
    rounding = 1e-5 if dtype == torch.float32 else 5e-3
    for t in range(tokens):
        row = [x[:, t] for x in (q, k, v, beta, log_alpha)]
        out = palimpsa_step(*row, prior, running, scale=0.5)
        torch.testing.assert_close(out.double(), y[:, t], rtol=rounding, atol=rounding * float(y.abs().max()))
        out = ssd_step(*row[:3], row[4], running_ssd, scale=0.5)
        torch.testing.assert_close(out.double(), y_ssd[:, t], rtol=rounding, atol=rounding * float(y_ssd.abs().max()))
    for state, expected in zip((*running, running_ssd), (*final, final_ssd), strict=True):
        torch.testing.assert_close(state.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 16), (20, 33), (2048, 3)])
def test_steps_follow_the_recurrence(key_dim: int, value_dim: int) -> None:
    check_steps(key_dim, value_dim, torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(128, 64), (96, 192), (48, 96), (256, 256), (2048, 2048), (7, 300)])
def test_steps_of_real_shapes(key_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    check_steps(key_dim, value_dim, dtype, heads=2, groups=1)
