"""What tokens add to the states of a scan, without scanning them: sums of outer products, differentiable."""

from __future__ import annotations

from typing import Any

import torch
from palimpsa_kernels import HeadParameters, Importance
from palimpsa_kernels.activations import likelihood_precision, step_and_decay, weighted_value
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_TOKENS = 8192
"""Tokens whose float32 copies exist at a time."""


def end_states(
    k: Tensor, x: Tensor, dt: Tensor, heads: HeadParameters, importance: Importance | None
) -> tuple[tuple[Tensor, ...], Tensor]:
    """States behind tokens that set out from none, and the tokens' decay; differentiable.

        M = sum_t exp(sum_{s > t} log_alpha_s) outer(v_t, k_t), Ibar likewise of beta_t and k_t ** 2

    Only the inputs are kept for backward. The sums are plain PyTorch's in float32: bf16 operands would round what a
    whole part of a row has to say to those behind it.

    Args:
        k: [T, G, K].
        x: [T, H, V].
        dt: [T, H] before bias and softplus.
        importance: its logits [T, H, V].

    Returns:
        (M,) or (M, Ibar), each [H, V, K] fp32, and exp(sum_t log_alpha_t) [H] fp32.
    """
    step, log_alpha = step_and_decay(dt, heads.dt_bias, heads.A_log)
    # From each token on: near the end, where the sum matters, it is as exact as its terms.
    onwards = log_alpha.double().flip(0).cumsum(0).flip(0)
    behind = (onwards - log_alpha).float()
    per_token = [k, x, step, behind]
    b_scale = None
    if importance is not None:
        per_token.append(importance.logits)
        b_scale = importance.b_scale
    return _AddedStates.apply(b_scale, *per_token).unbind(), onwards[0].float().exp()


class _AddedStates(torch.autograd.Function):
    """[kinds, H, V, K] of any number of tokens; a block's float32 copies are formed again for its backward pass."""

    @staticmethod
    def forward(ctx: Any, b_scale: Tensor | None, *per_token: Tensor) -> Tensor:
        ctx.save_for_backward(b_scale, *per_token)
        total: Tensor | None = None
        for block in zip(*(t.split(BLOCK_TOKENS) for t in per_token), strict=True):
            added = torch.stack([_sum_of_products(value, key) for value, key in _factors(b_scale, *block)])
            total = added if total is None else total.add_(added)
        assert total is not None
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        b_scale, *per_token = ctx.saved_tensors
        gradients = [torch.empty_like(t) for t in per_token]
        scale = [] if b_scale is None else [b_scale.detach().requires_grad_()]
        of_scale = None if b_scale is None else torch.zeros_like(b_scale)
        for start in range(0, len(per_token[0]), BLOCK_TOKENS):
            tokens = slice(start, start + BLOCK_TOKENS)
            block = [t[tokens].detach().requires_grad_() for t in per_token]
            with torch.enable_grad():
                factors = _factors(scale[0] if scale else None, *block)
            adjoints = [_product_gradients(*pair, state) for pair, state in zip(factors, grads[0], strict=True)]
            flat, flat_adjoints = ([t for pair in pairs for t in pair] for pairs in (factors, adjoints))
            of_block = torch.autograd.grad(flat, block + scale, flat_adjoints)
            for gradient, part in zip(gradients, of_block, strict=False):
                gradient[tokens] = part
            if of_scale is not None:
                of_scale += of_block[-1]
        return of_scale, *gradients


def _factors(
    b_scale: Tensor | None, k: Tensor, x: Tensor, step: Tensor, behind: Tensor, logits: Tensor | None = None
) -> list[tuple[Tensor, Tensor]]:
    """For M (and Ibar) the values [T, H, V], decayed, and keys [T, G, K] whose outer products are added, in fp32.

    `step` is dt and `behind` the logarithm of the decay by later tokens, [T, H].
    """
    decay = behind.exp().unsqueeze(-1)
    key = k.float()
    factors = [(weighted_value(x, step).float() * decay, key)]
    if logits is not None and b_scale is not None:
        factors.append((likelihood_precision(logits, b_scale, step).float() * decay, key.square()))
    return factors


def _sum_of_products(value: Tensor, key: Tensor) -> Tensor:
    """Sum over tokens of outer(value_t, key_t): [T, H, V], [T, G, K] -> [H, V, K]."""
    by_group = _by_group(value, key.shape[1])
    return (by_group.permute(1, 2, 0) @ key.transpose(0, 1)).unflatten(1, (-1, value.shape[2])).flatten(0, 1)


@torch.no_grad()
def _product_gradients(value: Tensor, key: Tensor, adjoint: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of value and key from the sum's adjoint [H, V, K]."""
    groups = key.shape[1]
    adjoint_by_group = adjoint.unflatten(0, (groups, -1)).flatten(1, 2)
    of_value = (key.transpose(0, 1) @ adjoint_by_group.mT).transpose(0, 1).reshape(value.shape)
    of_key = (_by_group(value, groups).transpose(0, 1) @ adjoint_by_group).transpose(0, 1)
    return of_value, of_key


def _by_group(value: Tensor, groups: int) -> Tensor:
    """[T, H, V] -> [T, G, H / G * V]."""
    return value.unflatten(1, (groups, -1)).flatten(2)
