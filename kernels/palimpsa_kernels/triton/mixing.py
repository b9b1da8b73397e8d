"""`palimpsa_kernels.mixing_scan` in Triton: activations, scan and skip as one differentiable function.

For the backward pass the raw inputs and what the scan keeps are kept, but not v and beta, which one pass forms again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from palimpsa_kernels.carry import Carry
from palimpsa_kernels.mixing import HeadParameters, Importance
from palimpsa_kernels.triton.activations import Raw, activate, activation_gradients, add_skip
from palimpsa_kernels.triton.launches import tokens_adjacent
from palimpsa_kernels.triton.palimpsa import ChunkPalimpsa
from palimpsa_kernels.triton.ssd import ChunkSSD


class ScanContext:
    """What a scan's autograd function keeps for its backward pass, inside of another function."""

    def __init__(self, trains_prior: bool = False) -> None:
        self.needs_input_grad = [True] * 5 + [trains_prior]
        self.saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Gradients are passed on as they come."""


class MixingScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, x: Tensor, dt: Tensor, strength: Tensor | None, logits: Tensor | None,
        dt_bias: Tensor, A_log: Tensor, D: Tensor, b_scale: Tensor | None, prior: Tensor | None, mean: Tensor | None,
        importance: Tensor | None, cu_seqlens: Tensor | None, scale: float, output_final_state: bool,
        carry: Carry | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        x, dt = tokens_adjacent(x), tokens_adjacent(dt)
        strength, logits = (None if t is None else tokens_adjacent(t) for t in (strength, logits))
        per_head = [None if p is None else p.contiguous() for p in (dt_bias, A_log, D, b_scale)]
        raw = Raw(x, dt, strength, logits, *per_head)  # type: ignore[arg-type]
        value, beta, log_alpha = activate(raw)
        scan = ScanContext(trains_prior=ctx.needs_input_grad[10])
        if beta is None or prior is None:
            y, final_mean = ChunkSSD.forward(
                scan, q, k, value, log_alpha, mean, cu_seqlens, scale, output_final_state, carry
            )
            final_importance = None
        else:
            y, final_mean, final_importance = ChunkPalimpsa.forward(
                scan, q, k, value, beta, log_alpha, prior, mean, importance, cu_seqlens, scale, None,
                output_final_state, carry,
            )  # fmt: skip
        add_skip(y, raw)

        # Two numbers stand for v and beta, which are formed again.
        ctx.formed = [0 if s is value else 1 if s is beta and beta is not None else None for s in scan.saved_tensors]
        kept = [s if f is None else None for s, f in zip(scan.saved_tensors, ctx.formed, strict=True)]
        scan.saved_tensors = ()
        ctx.scan = scan
        ctx.save_for_backward(x, dt, strength, logits, *per_head, *kept)
        ctx.set_materialize_grads(False)
        return y, final_mean, final_importance

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dy = None if grads[0] is None else tokens_adjacent(grads[0])
        raw = Raw(*ctx.saved_tensors[:8])
        value, beta, _ = activate(raw)
        scan: ScanContext = ctx.scan
        scan.saved_tensors = restored(ctx.saved_tensors[8:], ctx.formed, (value, beta))
        if beta is None:
            dq, dk, dvalue, dlog_alpha, dmean, *_ = ChunkSSD.backward(scan, dy, grads[1])
            dbeta = dprior = dimportance = None
        else:
            dq, dk, dvalue, dbeta, dlog_alpha, dprior, dmean, dimportance, *_ = ChunkPalimpsa.backward(
                scan, dy, *grads[1:]
            )
        scan.saved_tensors = ()
        del value, beta
        assert dvalue is not None
        assert dlog_alpha is not None
        own = activation_gradients(raw, dvalue, dbeta, dlog_alpha, dy)
        return (
            dq, dk, own.x, own.dt, own.strength, own.logits, own.dt_bias, own.A_log, own.D, own.b_scale, dprior, dmean,
            dimportance, None, None, None, None,
        )  # fmt: skip


def restored(
    kept: Sequence[Tensor | None], formed: Sequence[int | None], again: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The scan's saved tensors, with those that were formed again at their places."""
    return tuple(k if f is None else again[f] for k, f in zip(kept, formed, strict=True))


def mixing_scan(
    q: Tensor,
    k: Tensor,
    x: Tensor,
    dt: Tensor,
    heads: HeadParameters,
    importance: Importance | None,
    *,
    strength: Tensor | None = None,
    scale: float = 1.0,
    initial_state: tuple[Tensor, ...] | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    carry: Carry | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """See `palimpsa_kernels.mixing_scan`."""
    mean, evidence = (*(initial_state or ()), None, None)[:2]
    logits, b_scale, prior = importance or (None, None, None)
    y, *final = MixingScan.apply(
        q, k, x, dt, strength, logits, heads.dt_bias, heads.A_log, heads.D, b_scale, prior, mean, evidence, cu_seqlens,
        scale, output_final_state, carry,
    )  # fmt: skip
    return y, tuple(state for state in final if state is not None)
