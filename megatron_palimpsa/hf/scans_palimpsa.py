"""Palimpsa's and Mamba2's scans and their convolution in plain PyTorch, in fp32, differentiable by autograd.

Per head, with alpha_t = exp(log_alpha_t) (arXiv 2602.09075; without importance it is Mamba2's SSD, arXiv 2405.21060):

    M_t    = alpha_t M_{t-1}    + v_t k_t^T
    Ibar_t = alpha_t Ibar_{t-1} + beta_t (k_t^2)^T
    y_t    = (M_t / (prior + Ibar_t)) q_t               without importance: M_t q_t

Tokens are worked on in chunks. What a chunk adds to the states is a matrix product, states pass from chunk to chunk,
and inside of the chunks, all at once, SSD is a matrix product again while Palimpsa, whose readout divides element by
element, walks from token to token. Decays between tokens are formed as differences of sums in float64 and masked before
exp: they are never positive, and nothing is divided by a decay, which may be 0. A token with log_alpha, v and beta 0
changes no state.

Shapes: B rows, T tokens, H heads, G groups (dividing H) that share q and k, K and V channels; n chunks of L tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 32
SEGMENT_ELEMENTS = 2**23
"""Elements of one state over the chunks that are worked on together."""
LOWEST_LOG_ALPHA = -100.0
"""As in training: exp of it is 0 beside any state in fp32."""


States = tuple[Tensor, ...]
"""(M,), or (M, Ibar) with importance, each [B, H, V, K] fp32."""
HeadParameters = tuple[Tensor, Tensor, Tensor]
"""dt_bias, A_log and D, each [H] fp32."""
Importance = tuple[Tensor, Tensor, Tensor]
"""Of beta: logits [B, T, H, V] and b_scale [H] fp32; prior [H] fp32."""


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution with SiLU.

    Args:
        x: [B, T, D].
        weight, bias: [D, W], [D]; weight[:, W - 1] meets the current token.
        window: the W - 1 inputs before, oldest first [B, D, W - 1]; None: zeros.

    Returns:
        y [B, T, D], and the window behind the last token.
    """
    width = weight.shape[1]
    x = x.mT
    before = x.new_zeros(*x.shape[:2], width - 1) if window is None else window.to(x.dtype)
    inputs = torch.cat([before, x], dim=-1)
    y = F.silu(F.conv1d(inputs, weight[:, None], bias, groups=weight.shape[0])).mT
    return y, inputs[..., inputs.shape[-1] - (width - 1) :]


def activate(
    x: Tensor, dt: Tensor, heads: HeadParameters, importance: Importance | None, strength: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What the scans take, in fp32.

        dt = softplus(dt + dt_bias)     log_alpha = max(-dt exp(A_log), -100)
        v  = x dt                       beta      = sigmoid(logits) softplus(b_scale) dt

    With `strength` (Palimpsa-D), sigmoid(strength) takes the place of dt in v and beta, but not in log_alpha.

    Args:
        x: [B, T, H, V].
        dt, strength: [B, T, H].
        importance: None for Mamba2.

    Returns:
        v, log_alpha and beta, which is None without importance.
    """
    dt_bias, A_log, _ = heads
    step = F.softplus(dt.float() + dt_bias)
    log_alpha = (-step * A_log.exp()).clamp(min=LOWEST_LOG_ALPHA)
    write = step if strength is None else torch.sigmoid(strength.float())
    beta = None
    if importance is not None:
        logits, b_scale, _ = importance
        beta = torch.sigmoid(logits.float()) * (F.softplus(b_scale) * write)[..., None]
    return x.float() * write[..., None], log_alpha, beta


def mixing_scan(
    q: Tensor,
    k: Tensor,
    x: Tensor,
    dt: Tensor,
    heads: HeadParameters,
    importance: Importance | None = None,
    strength: Tensor | None = None,
    scale: float = 1.0,
    states: States | None = None,
) -> tuple[Tensor, States]:
    """The scan between its activations (`activate`) and the skip D x.

    Args:
        q, k: [B, T, G, K].
        x, dt, importance, strength: as `activate`'s.
        scale: factor on what the scan reads out.
        states: before the first token; None: zeros.

    Returns:
        y [B, T, H, V] in x's dtype, and the states behind the last token.
    """
    with torch.autocast(x.device.type, enabled=False):
        v, log_alpha, beta = activate(x, dt, heads, importance, strength)
        prior = None if importance is None else importance[2]
        y, states = scan(scale * q.float(), k.float(), v, log_alpha, beta, prior, states)
        return (y + heads[2][:, None] * x.float()).to(x.dtype), states


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    beta: Tensor | None = None,
    prior: Tensor | None = None,
    states: States | None = None,
) -> tuple[Tensor, States]:
    """Palimpsa's scan, or without beta Mamba2's.

    Args:
        q, k: [B, T, G, K].
        v, beta: [B, T, H, V]; beta >= 0.
        log_alpha: [B, T, H], in [-100, 0].
        prior: [H], > 0.
        states: as `mixing_scan`'s.

    Returns:
        y [B, T, H, V], and the states behind the last token.
    """
    batch, tokens, heads, value_dim = v.shape
    if states is None:
        state = v.new_zeros(1 if beta is None else 2, batch, heads, value_dim, k.shape[3])
    else:
        state = torch.stack(states)
    length = min(CHUNK, tokens)
    size = length * max(1, SEGMENT_ELEMENTS // state[0].numel())
    outputs = []
    for start in range(0, tokens, size):
        part = slice(start, start + size)
        of_beta = None if beta is None else beta[:, part]
        y, state = _segment(q[:, part], k[:, part], v[:, part], log_alpha[:, part], of_beta, prior, state, length)
        outputs.append(y)
    return torch.cat(outputs, dim=1), tuple(state)


def _segment(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    beta: Tensor | None,
    prior: Tensor | None,
    state: Tensor,
    length: int,
) -> tuple[Tensor, Tensor]:
    """`scan` of some chunks together; `state` [1 or 2, B, H, V, K]."""
    tokens, heads = v.shape[1:3]
    q, k = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    q, k, v, log_alpha = (_chunked(x, length) for x in (q, k, v, log_alpha))
    if beta is None:
        values, keys = v[None], k[None]
    else:
        values, keys = torch.stack([v, _chunked(beta, length)]), torch.stack([k, k**2])
    sums = log_alpha.double().cumsum(-1)
    to_end = (sums[..., -1:] - sums).float().exp()[..., None]
    whole = sums[..., -1].float().exp()[..., None, None]
    added = (values * to_end).mT @ keys
    starts = []
    for chunk in range(added.shape[2]):
        starts.append(state)
        state = whole[:, chunk] * state + added[:, :, chunk]
    before = torch.stack(starts, dim=2)
    y = _products(q, k, v, sums, before[0]) if prior is None else _walk(q, values, keys, log_alpha.exp(), prior, before)
    return y.transpose(2, 3).flatten(1, 2)[:, :tokens], state


def _chunked(x: Tensor, length: int) -> Tensor:
    """[B, T, H, ...] -> [B, n, H, L, ...], zeros behind the last token."""
    missing = -x.shape[1] % length
    x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
    return x.unflatten(1, (-1, length)).transpose(2, 3)


def _products(q: Tensor, k: Tensor, v: Tensor, sums: Tensor, before: Tensor) -> Tensor:
    """y [B, n, H, L, V] of SSD; `sums` of log_alpha inside the chunks, `before` [B, n, H, V, K] the states before."""
    length = sums.shape[-1]
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    between = (sums[..., :, None] - sums[..., None, :]).float().masked_fill(future, -torch.inf).exp()
    return (q @ k.mT * between) @ v + (q @ before.mT) * sums.float().exp()[..., None]


def _walk(q: Tensor, values: Tensor, keys: Tensor, alpha: Tensor, prior: Tensor, before: Tensor) -> Tensor:
    """y [B, n, H, L, V] of Palimpsa, every chunk from the states [2, B, n, H, V, K] before it."""
    state, outputs = before, []
    for t in range(q.shape[3]):
        state = alpha[..., t, None, None] * state + values[..., t, :, None] * keys[..., t, None, :]
        mean = state[0] / (prior[:, None, None] + state[1])
        outputs.append((mean @ q[..., t, :, None])[..., 0])
    return torch.stack(outputs, dim=3)
