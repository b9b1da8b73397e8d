"""Ground truth: the recurrences in float64, one token after the other, differentiable by autograd.

Slow and plain on purpose. Every other implementation of the package is tested against these functions.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def documents(batch: int, tokens: int, cu_seqlens: Tensor | None) -> Iterator[tuple[int, int, int]]:
    """Yield (row, start, end) of each document: the rows themselves, or the pieces of row 0 between the offsets."""
    if cu_seqlens is None:
        yield from ((row, 0, tokens) for row in range(batch))
        return
    offsets = cu_seqlens.tolist()
    yield from ((0, start, end) for start, end in pairwise(offsets))


def _rows(batch: int, tokens: int, pieces: list[tuple[int, int, list[Tensor]]], like: Tensor) -> Tensor:
    """Put each document's outputs, (row, start, list over its tokens), in place in [B, T, ...], zero elsewhere."""
    rows = [[torch.zeros_like(like)] * tokens for _ in range(batch)]
    for row, start, outputs in pieces:
        rows[row][start : start + len(outputs)] = outputs
    if not tokens:
        return like.new_zeros(batch, 0, *like.shape)
    return torch.stack([torch.stack(row) for row in rows])


def palimpsa_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_alpha: Tensor,
    prior: Tensor,
    *,
    scale: float = 1.0,
    initial_state: tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Palimpsa's recurrence, y_t = scale * (M_t / (prior + Ibar_t)) @ q_t, in float64.

    Shapes as in `palimpsa_kernels.chunk_palimpsa`; returns y [B, T, H, V] and the final states (M, Ibar) [N, H, V, K].
    """
    q, k, v, beta, log_alpha, prior = (x.double() for x in (q, k, v, beta, log_alpha, prior))
    batch, tokens, heads, value_dim = v.shape
    heads_per_group = heads // k.shape[2]
    y_pieces, final_means, final_importances = [], [], []
    for n, (row, start, end) in enumerate(documents(batch, tokens, cu_seqlens)):
        if initial_state is None:
            mean = v.new_zeros(heads, value_dim, k.shape[3])
            importance = torch.zeros_like(mean)
        else:
            mean, importance = (state[n].double() for state in initial_state)
        outputs = []
        for t in range(start, end):
            key = k[row, t].repeat_interleave(heads_per_group, 0)
            query = q[row, t].repeat_interleave(heads_per_group, 0)
            alpha = log_alpha[row, t].exp()[:, None, None]
            mean = alpha * mean + v[row, t][:, :, None] * key[:, None, :]
            importance = alpha * importance + beta[row, t][:, :, None] * key[:, None, :] ** 2
            posterior_mean = mean / (prior[:, None, None] + importance)
            outputs.append(scale * (posterior_mean * query[:, None, :]).sum(-1))
        y_pieces.append((row, start, outputs))
        final_means.append(mean)
        final_importances.append(importance)
    y = _rows(batch, tokens, y_pieces, v.new_zeros(heads, value_dim))
    return y, (torch.stack(final_means), torch.stack(final_importances))


def ssd_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mamba2's recurrence, M_t = alpha_t M_{t-1} + outer(v_t, k_t), y_t = scale * M_t @ q_t, in float64.

    Shapes as in `palimpsa_kernels.chunk_ssd`; returns y [B, T, H, V] and the final state M [N, H, V, K].
    """
    q, k, v, log_alpha = (x.double() for x in (q, k, v, log_alpha))
    batch, tokens, heads, value_dim = v.shape
    heads_per_group = heads // k.shape[2]
    y_pieces, final_states = [], []
    for n, (row, start, end) in enumerate(documents(batch, tokens, cu_seqlens)):
        state = v.new_zeros(heads, value_dim, k.shape[3]) if initial_state is None else initial_state[n].double()
        outputs = []
        for t in range(start, end):
            key = k[row, t].repeat_interleave(heads_per_group, 0)
            query = q[row, t].repeat_interleave(heads_per_group, 0)
            state = log_alpha[row, t].exp()[:, None, None] * state + v[row, t][:, :, None] * key[:, None, :]
            outputs.append(scale * (state * query[:, None, :]).sum(-1))
        y_pieces.append((row, start, outputs))
        final_states.append(state)
    return _rows(batch, tokens, y_pieces, v.new_zeros(heads, value_dim)), torch.stack(final_states)


def causal_conv1d_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None = "silu",
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution, y_t = act(bias + sum_w weight[:, w] x_{t - (W - 1) + w}), in float64.

    Shapes as in `palimpsa_kernels.causal_conv1d`; returns y [B, T, D] and the final state [N, D, W-1].
    """
    x, weight = x.double(), weight.double()
    batch, tokens, dim = x.shape
    width = weight.shape[1]
    y_pieces, final_states = [], []
    for n, (row, start, end) in enumerate(documents(batch, tokens, cu_seqlens)):
        window = x.new_zeros(dim, width - 1) if initial_state is None else initial_state[n].double()
        outputs = []
        for t in range(start, end):
            window = torch.cat([window, x[row, t][:, None]], 1)
            output = (weight * window).sum(1)
            if bias is not None:
                output = output + bias.double()
            outputs.append(F.silu(output) if activation == "silu" else output)
            window = window[:, 1:]
        y_pieces.append((row, start, outputs))
        final_states.append(window)
    return _rows(batch, tokens, y_pieces, x.new_zeros(dim)), torch.stack(final_states)
