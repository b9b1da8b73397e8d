"""The scans as a layer uses them: raw dt and beta logits in, the skip D * x added to what comes out."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from palimpsa_kernels import checks, peers
from palimpsa_kernels.activations import (
    add_skip,
    likelihood_precision,
    step_and_decay,
    weighted_value,
    write_strength,
)
from palimpsa_kernels.api import chunk_palimpsa, chunk_ssd
from palimpsa_kernels.carry import Carry, HandOver
from palimpsa_kernels.dispatch import scan_implementation


class Importance(NamedTuple):
    """What a Palimpsa layer has beyond Mamba2's."""

    logits: Tensor
    """of beta, before the sigmoid [B, T, H, V], in x's dtype"""
    b_scale: Tensor
    """of beta, before the softplus [H] fp32"""
    prior: Tensor
    """importance without evidence [H] fp32, > 0"""


class HeadParameters(NamedTuple):
    """One number a head, each [H] fp32."""

    dt_bias: Tensor
    A_log: Tensor
    D: Tensor


def mixing_scan(
    q: Tensor,
    k: Tensor,
    x: Tensor,
    dt: Tensor,
    heads: HeadParameters,
    importance: Importance | None = None,
    *,
    strength: Tensor | None = None,
    scale: float = 1.0,
    initial_state: tuple[Tensor, ...] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    carry: Carry | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`chunk_palimpsa` (`chunk_ssd` without importance) between its activations and the skip, arXiv 2602.09075.

        dt = softplus(dt + dt_bias)     log_alpha = max(-dt * exp(A_log), -100)
        v  = x * dt                     beta      = sigmoid(logits) * softplus(b_scale) * dt
        y  = scan(q, k, v, beta, log_alpha, prior, scale) + D * x

    With `strength` (Palimpsa-D), sigmoid(strength) takes the place of dt in v and beta, but not in log_alpha.

    Differentiable in every tensor but cu_seqlens. Activations, decays and the skip are formed in fp32; v, beta and y
    are rounded to x's dtype. On CUDA the activations take one pass forward and one backward, v and beta are formed
    again for the backward pass instead of being kept, and the parameters' gradients repeat bit for bit.

    Args:
        q: queries [B, T, G, K] (Mamba2's C); bf16, fp16 or fp32. G divides H.
        k: keys [B, T, G, K] (Mamba2's B), in q's dtype.
        x: [B, T, H, V], in q's dtype.
        dt: before bias and softplus [B, T, H], in q's dtype or fp32.
        heads: dt_bias, A_log and D.
        importance: None for Mamba2.
        strength: how strongly a token is written, before the sigmoid [B, T, H], in q's dtype or fp32; None: dt.
        scale: factor on what the scan reads out.
        initial_state: (M,), or (M, Ibar) with importance, each [N, H, V, K] fp32; as in `chunk_palimpsa`.
        output_final_state: also return the states behind each document's last token.
        cu_seqlens: document offsets [N + 1] int32 in the single row, as in `chunk_palimpsa`; behind the last offset
            y is D * x.
        carry: q, k, x and dt are a part of the single row, which other ranks hold the other parts of; cu_seqlens are
            its documents', none empty. In place of initial_state.

    Returns:
        y [B, T, H, V] in x's dtype, and the final states as in `initial_state`, () unless they are asked for.

    Raises:
        ValueError, RuntimeError: as in `chunk_palimpsa`.
    """
    _check(q, k, x, dt, heads, importance, strength, initial_state, cu_seqlens)
    checks.require(
        carry is None or (initial_state is None and cu_seqlens is not None),
        "carry takes cu_seqlens, and no initial_state",
    )
    call = peers.facts(
        x,
        cu_seqlens,
        initial_state is not None or output_final_state or carry is not None,
        key_dim=q.shape[3],
        mamba2=importance is None and strength is None and scale == 1.0,
    )
    scan = scan_implementation(call)
    options: dict[str, Any] = {
        "strength": strength,
        "scale": scale,
        "output_final_state": output_final_state,
        "cu_seqlens": cu_seqlens,
    }
    if scan is None and carry is not None:
        return _carried(q, k, x, dt, heads, importance, carry, **options)
    if carry is not None:
        options["carry"] = carry
    y, final = (scan or composed)(q, k, x, dt, heads, importance, initial_state=initial_state, **options)
    checks.refuse_second_order((y, *final))
    return y, final


def _carried(
    q: Tensor, k: Tensor, x: Tensor, dt: Tensor, heads: HeadParameters, importance: Importance | None, carry: Carry, *,
    output_final_state: bool, **options: Any,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """`composed` twice: for what the tokens leave by themselves, then from what comes from the parts before."""
    options |= {"output_final_state": True}
    _, alone = composed(q, k, x, dt, heads, importance, initial_state=None, **options)
    _, log_alpha = step_and_decay(dt, heads.dt_bias, heads.A_log)
    start = HandOver.apply(carry, torch.stack([state[-1] for state in alone]), log_alpha[0].sum(0).exp())
    # Also where nothing comes from before: every rank takes part in the exchange of the adjoints.
    initial = tuple(
        torch.cat([own[None], torch.zeros_like(state[1:])]) for own, state in zip(start, alone, strict=True)
    )
    y, final = composed(q, k, x, dt, heads, importance, initial_state=initial, **options)
    return y, final if output_final_state else ()


def composed(
    q: Tensor,
    k: Tensor,
    x: Tensor,
    dt: Tensor,
    heads: HeadParameters,
    importance: Importance | None,
    *,
    initial_state: tuple[Tensor, ...] | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    strength: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`mixing_scan` from PyTorch operations around a scan."""
    step, log_alpha = step_and_decay(dt, heads.dt_bias, heads.A_log)
    write = write_strength(step, strength)
    value = weighted_value(x, write)
    final: tuple[Tensor, ...] = ()
    if importance is None:
        initial = None if initial_state is None else initial_state[0]
        y, mean = chunk_ssd(
            q, k, value, log_alpha, scale=scale, initial_state=initial, output_final_state=True, cu_seqlens=cu_seqlens
        )
        final = (mean,)
    else:
        beta = likelihood_precision(importance.logits, importance.b_scale, write)
        states = None if initial_state is None else (initial_state[0], initial_state[1])
        y, final = chunk_palimpsa(
            q,
            k,
            value,
            beta,
            log_alpha,
            importance.prior,
            scale=scale,
            initial_state=states,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
        )
    return add_skip(y, x, heads.D), final if output_final_state else ()


def _check(
    q: Tensor,
    k: Tensor,
    x: Tensor,
    dt: Tensor,
    heads: HeadParameters,
    importance: Importance | None,
    strength: Tensor | None,
    initial_state: tuple[Tensor, ...] | None,
    cu_seqlens: Tensor | None,
) -> None:
    checks.check_heads(q, x, 4)
    batch, tokens, _, key_dim = q.shape
    count, value_dim = x.shape[2:]
    states = checks.number_of_states(q, cu_seqlens)
    steps = {"dt": dt} if strength is None else {"dt": dt, "strength": strength}
    shapes: dict[str, tuple[Tensor, tuple[int, ...]]] = {
        "k": (k, tuple(q.shape)),
        "x": (x, (batch, tokens, count, value_dim)),
        **{name: (tensor, (batch, tokens, count)) for name, tensor in steps.items()},
    }
    inputs = {"q": q, "k": k, "x": x}
    float32 = heads._asdict()
    if importance is not None:
        shapes["logits"] = (importance.logits, tuple(x.shape))
        inputs["logits"] = importance.logits
        float32 |= {"b_scale": importance.b_scale, "prior": importance.prior}
    shapes |= {name: (tensor, (count,)) for name, tensor in float32.items()}
    if initial_state is not None:
        names = ("initial M",) if importance is None else ("initial M", "initial Ibar")
        checks.require(len(initial_state) == len(names), f"initial_state has {len(initial_state)} states, not {names}")
        for name, state in zip(names, initial_state, strict=True):
            shapes[name] = (state, (states, count, value_dim, key_dim))
            float32[name] = state
    checks.check_shapes(shapes)
    checks.check_dtypes(inputs, float32)
    allowed = dict.fromkeys((q.dtype, torch.float32))
    for name, tensor in steps.items():
        checks.require(
            tensor.dtype in allowed, f"{name} has dtype {tensor.dtype}, expected {' or '.join(map(str, allowed))}"
        )
        checks.require(tensor.device == q.device, f"{name} is on {tensor.device}, but q is on {q.device}")
    if importance is not None:
        checks.check_prior(importance.prior)
