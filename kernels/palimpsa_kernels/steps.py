"""One token of the scans in PyTorch, for decoding; states are updated in place."""

from torch import Tensor


def palimpsa_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_alpha: Tensor,
    prior: Tensor,
    states: tuple[Tensor, Tensor],
    *,
    scale: float = 1.0,
) -> Tensor:
    """See `palimpsa_kernels.palimpsa_step`."""
    mean, importance = states
    heads = v.shape[1]
    key = _row_per_head(k, heads)
    alpha = log_alpha.exp()[:, :, None, None]
    mean.mul_(alpha).addcmul_(v.float()[..., None], key)
    importance.mul_(alpha).addcmul_(beta.float()[..., None], key**2)
    posterior_mean = mean / (prior[:, None, None] + importance)
    return (scale * (posterior_mean * _row_per_head(q, heads)).sum(-1)).to(v.dtype)


def ssd_step(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, state: Tensor, *, scale: float = 1.0) -> Tensor:
    """See `palimpsa_kernels.ssd_step`."""
    heads = v.shape[1]
    state.mul_(log_alpha.exp()[:, :, None, None]).addcmul_(v.float()[..., None], _row_per_head(k, heads))
    return (scale * (state * _row_per_head(q, heads)).sum(-1)).to(v.dtype)


def _row_per_head(x: Tensor, heads: int) -> Tensor:
    """[B, G, K] to [B, H, 1, K] in fp32."""
    return x.float().repeat_interleave(heads // x.shape[1], 1)[:, :, None, :]
