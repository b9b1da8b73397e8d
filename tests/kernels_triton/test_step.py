"""The one-token kernels against the recurrences."""

import pytest
import torch
from palimpsa_kernels.reference import palimpsa_reference, ssd_reference

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 16), (20, 33), (2048, 3)])
def test_steps_follow_the_recurrence(key_dim: int, value_dim: int) -> None:
    from palimpsa_kernels.triton import palimpsa_step, ssd_step

    torch.manual_seed(0)
    batch, tokens, heads, groups = 2, 3, 4, 2
    q, k = (torch.randn(batch, tokens, groups, key_dim) for _ in range(2))
    v, beta = torch.randn(batch, tokens, heads, value_dim), torch.rand(batch, tokens, heads, value_dim)
    log_alpha, prior = -3 * torch.rand(batch, tokens, heads), 0.5 + torch.rand(heads)
    states = tuple(torch.rand(batch, heads, value_dim, key_dim) for _ in range(2))
    y, final = palimpsa_reference(q, k, v, beta, log_alpha, prior, scale=0.5, initial_state=states)
    y_ssd, final_ssd = ssd_reference(q, k, v, log_alpha, scale=0.5, initial_state=states[0])

    running = tuple(x.to(DEVICE) for x in states)
    running_ssd = states[0].mT.contiguous().mT.to(DEVICE)  # not contiguous
    for t in range(tokens):
        row = [x[:, t].to(DEVICE) for x in (q, k, v, beta, log_alpha)]
        out = palimpsa_step(*row, prior.to(DEVICE), running, scale=0.5)
        torch.testing.assert_close(out.double().cpu(), y[:, t], rtol=1e-5, atol=1e-5 * float(y.abs().max()))
        out = ssd_step(*row[:3], row[4], running_ssd, scale=0.5)
        torch.testing.assert_close(out.double().cpu(), y_ssd[:, t], rtol=1e-5, atol=1e-5 * float(y_ssd.abs().max()))
    for state, expected in zip((*running, running_ssd), (*final, final_ssd), strict=True):
        torch.testing.assert_close(state.double().cpu(), expected, rtol=1e-5, atol=1e-6)
