"""The public functions: documentation, input checks, and the choice of the implementation."""

from typing import Literal, overload

import torch
from torch import Tensor

from palimpsa_kernels import checks, peers
from palimpsa_kernels.dispatch import convolution_implementation, implementation

States = tuple[Tensor, Tensor]


@overload
def chunk_palimpsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_alpha: Tensor,
    prior: Tensor,
    *,
    scale: float = ...,
    initial_state: States | None = ...,
    output_final_state: Literal[False] = ...,
    cu_seqlens: Tensor | None = ...,
    chunk_size: int | None = ...,
) -> Tensor: ...


@overload
def chunk_palimpsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_alpha: Tensor,
    prior: Tensor,
    *,
    scale: float = ...,
    initial_state: States | None = ...,
    output_final_state: Literal[True],
    cu_seqlens: Tensor | None = ...,
    chunk_size: int | None = ...,
) -> tuple[Tensor, States]: ...


def chunk_palimpsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_alpha: Tensor,
    prior: Tensor,
    *,
    scale: float = 1.0,
    initial_state: States | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
) -> Tensor | tuple[Tensor, States]:
    """Palimpsa's scan (arXiv 2602.09075) over whole sequences, differentiable in every tensor argument but cu_seqlens.

    Per head, with alpha_t = exp(log_alpha_t) and the states zero at the start of a document unless given:

        M_t    = alpha_t * M_{t-1}    + outer(v_t, k_t)
        Ibar_t = alpha_t * Ibar_{t-1} + outer(beta_t, k_t ** 2)
        y_t    = scale * (M_t / (prior + Ibar_t)) @ q_t

    Args:
        q: queries [B, T, G, K]; G divides H, and the H / G heads of a group share q and k. bf16, fp16 or fp32.
        k: keys [B, T, G, K], in q's dtype.
        v: values [B, T, H, V], in q's dtype, already weighted (the paper's beta * v).
        beta: likelihood precision of each value channel [B, T, H, V], >= 0, in q's dtype.
        log_alpha: log of the share of old evidence that is kept [B, T, H], in [-100, 0], fp32.
        prior: importance without evidence [H], > 0, fp32.
        scale: factor on y.
        initial_state: (M, Ibar), each [N, H, V, K] fp32; N = B, or the number of documents with cu_seqlens.
        output_final_state: also return the states behind each document's last token.
        cu_seqlens: document offsets [N + 1] int32 in the single row (B = 1): starts at 0, does not decrease, ends at
            T or before. Equal offsets are an empty document, whose final state is its initial state. Tokens behind
            the last offset are padding: y is 0 there and they take no gradient.
        chunk_size: tokens that are worked on together; None leaves the choice to the implementation.

    Returns:
        y [B, T, H, V] in v's dtype; with output_final_state (y, (M, Ibar)), the states [N, H, V, K] in fp32.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, B > 1 with cu_seqlens, or (on the CPU only,
            where looking costs nothing) offsets, prior, beta or log_alpha outside of their range.
        RuntimeError: in backward with create_graph=True; there are no second derivatives.
    """
    checks.check_heads(q, v, 4)
    batch, tokens, _, key_dim = q.shape
    heads, value_dim = v.shape[2:]
    states = checks.number_of_states(q, cu_seqlens)
    shapes = {
        "k": (k, q.shape),
        "v": (v, (batch, tokens, heads, value_dim)),
        "beta": (beta, v.shape),
        "log_alpha": (log_alpha, (batch, tokens, heads)),
        "prior": (prior, (heads,)),
    }
    float32 = {"log_alpha": log_alpha, "prior": prior}
    if initial_state is not None:
        checks.check_pair(initial_state, "initial_state")
        for name, state in zip(("initial M", "initial Ibar"), initial_state, strict=True):
            shapes[name] = (state, (states, heads, value_dim, key_dim))
            float32[name] = state
    checks.check_shapes(shapes)
    checks.check_dtypes({"q": q, "k": k, "v": v, "beta": beta}, float32)
    checks.check_prior(prior)
    checks.check_beta(beta)
    checks.check_log_alpha(log_alpha)
    checks.require(
        chunk_size is None or (isinstance(chunk_size, int) and chunk_size > 0),
        f"chunk_size must be a positive integer, not {chunk_size}",
    )
    out = implementation("chunk_palimpsa", q.device.type)(
        q,
        k,
        v,
        beta,
        log_alpha,
        prior,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
    )
    checks.refuse_second_order((out[0], *out[1]) if output_final_state else (out,))
    return out


def palimpsa_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_alpha: Tensor,
    prior: Tensor,
    states: States,
    *,
    scale: float = 1.0,
) -> Tensor:
    """One token of Palimpsa's scan, for decoding; updates the states in place and is not differentiable.

    Args:
        q: query [B, G, K]; bf16, fp16 or fp32.
        k: key [B, G, K], in q's dtype.
        v: weighted value [B, H, V], in q's dtype.
        beta: likelihood precision [B, H, V], in q's dtype.
        log_alpha: [B, H], fp32.
        prior: [H], > 0, fp32.
        states: (M, Ibar), each [B, H, V, K] fp32, updated in place.
        scale: factor on y.

    Returns:
        y [B, H, V] in v's dtype.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together; on the CPU, values out of range.
    """
    checks.check_heads(q, v, 3)
    checks.check_pair(states, "states")
    batch, heads, value_dim = v.shape
    state_shape = (batch, heads, value_dim, q.shape[2])
    checks.check_shapes(
        {
            "q": (q, (batch, *q.shape[1:])),
            "k": (k, q.shape),
            "beta": (beta, v.shape),
            "log_alpha": (log_alpha, (batch, heads)),
            "prior": (prior, (heads,)),
            "M": (states[0], state_shape),
            "Ibar": (states[1], state_shape),
        }
    )
    float32 = {"log_alpha": log_alpha, "prior": prior, "M": states[0], "Ibar": states[1]}
    checks.check_dtypes({"q": q, "k": k, "v": v, "beta": beta}, float32)
    checks.check_prior(prior)
    checks.check_beta(beta)
    checks.check_log_alpha(log_alpha)
    with torch.no_grad():
        return implementation("palimpsa_step", q.device.type)(q, k, v, beta, log_alpha, prior, states, scale=scale)


@overload
def chunk_ssd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    *,
    scale: float = ...,
    initial_state: Tensor | None = ...,
    output_final_state: Literal[False] = ...,
    cu_seqlens: Tensor | None = ...,
) -> Tensor: ...


@overload
def chunk_ssd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    *,
    scale: float = ...,
    initial_state: Tensor | None = ...,
    output_final_state: Literal[True],
    cu_seqlens: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...


def chunk_ssd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba2's scan (SSD, arXiv 2405.21060), the limit of `chunk_palimpsa` without importance (beta = 0, prior = 1).

        M_t = alpha_t * M_{t-1} + outer(v_t, k_t)
        y_t = scale * M_t @ q_t

    In Mamba2's names q is C, k is B, v is x * dt and log_alpha is -dt * exp(A_log).

    Args:
        q: [B, T, G, K]; bf16, fp16 or fp32.
        k: [B, T, G, K], in q's dtype.
        v: [B, T, H, V], in q's dtype.
        log_alpha: [B, T, H], in [-100, 0], fp32.
        scale: factor on y.
        initial_state: M [N, H, V, K] fp32; N = B, or the number of documents with cu_seqlens.
        output_final_state: also return the state behind each document's last token.
        cu_seqlens: document offsets [N + 1] int32, as in `chunk_palimpsa`.

    Returns:
        y [B, T, H, V] in v's dtype; with output_final_state (y, M), M [N, H, V, K] in fp32.

    Raises:
        ValueError, RuntimeError: as in `chunk_palimpsa`.
    """
    checks.check_heads(q, v, 4)
    batch, tokens, _, key_dim = q.shape
    heads, value_dim = v.shape[2:]
    states = checks.number_of_states(q, cu_seqlens)
    shapes = {
        "k": (k, q.shape),
        "v": (v, (batch, tokens, heads, value_dim)),
        "log_alpha": (log_alpha, (batch, tokens, heads)),
    }
    float32 = {"log_alpha": log_alpha}
    if initial_state is not None:
        shapes["initial_state"] = (initial_state, (states, heads, value_dim, key_dim))
        float32["initial_state"] = initial_state
    checks.check_shapes(shapes)
    checks.check_dtypes({"q": q, "k": k, "v": v}, float32)
    checks.check_log_alpha(log_alpha)
    out = implementation("chunk_ssd", q.device.type)(
        q,
        k,
        v,
        log_alpha,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )
    checks.refuse_second_order(out if output_final_state else (out,))
    return out


def ssd_step(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, state: Tensor, *, scale: float = 1.0) -> Tensor:
    """One token of Mamba2's scan, for decoding; updates the state in place and is not differentiable.

    Args:
        q: [B, G, K]; bf16, fp16 or fp32.
        k: [B, G, K], in q's dtype.
        v: [B, H, V], in q's dtype.
        log_alpha: [B, H], fp32.
        state: M [B, H, V, K] fp32, updated in place.
        scale: factor on y.

    Returns:
        y [B, H, V] in v's dtype.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together; on the CPU, values out of range.
    """
    checks.check_heads(q, v, 3)
    batch, heads, value_dim = v.shape
    checks.check_shapes(
        {
            "q": (q, (batch, *q.shape[1:])),
            "k": (k, q.shape),
            "log_alpha": (log_alpha, (batch, heads)),
            "state": (state, (batch, heads, value_dim, q.shape[2])),
        }
    )
    checks.check_dtypes({"q": q, "k": k, "v": v}, {"log_alpha": log_alpha, "state": state})
    checks.check_log_alpha(log_alpha)
    with torch.no_grad():
        return implementation("ssd_step", q.device.type)(q, k, v, log_alpha, state, scale=scale)


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None = ...,
    initial_state: Tensor | None = ...,
    output_final_state: Literal[False] = ...,
    cu_seqlens: Tensor | None = ...,
) -> Tensor: ...


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None = ...,
    initial_state: Tensor | None = ...,
    output_final_state: Literal[True],
    cu_seqlens: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None = "silu",
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Depthwise causal convolution that starts anew at each document.

        y_t = act(bias + sum_w weight[:, w] * x_{t - (W - 1) + w})

    Args:
        x: [B, T, D]; bf16, fp16 or fp32.
        weight: a filter of width W per channel [D, W], in x's dtype or fp32; weight[:, W - 1] meets the current token.
        bias: [D], in the weight's dtype, or None.
        activation: "silu" or None.
        initial_state: the W - 1 inputs before each document [N, D, W - 1], oldest first, in x's dtype or fp32; zeros
            if not given. N = B, or the number of documents with cu_seqlens.
        output_final_state: also return the last W - 1 inputs of each document (of the initial state, where the
            document is shorter).
        cu_seqlens: document offsets [N + 1] int32, as in `chunk_palimpsa`; y is 0 behind the last offset.

    Returns:
        y [B, T, D] in x's dtype; with output_final_state (y, state [N, D, W - 1] in x's dtype).

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, an unknown activation, wrong offsets.
    """
    checks.check_tensors({"x": x, "weight": weight})
    checks.require(x.dim() == 3, f"x has {x.dim()} dimensions, expected 3")
    dim = x.shape[2]
    _check_filter(x, weight, bias, dim, activation)
    states = checks.number_of_states(x, cu_seqlens)
    if initial_state is not None:
        _check_window(x, initial_state, (states, dim, weight.shape[1] - 1))
    call = peers.facts(
        x, cu_seqlens, initial_state is not None or output_final_state, width=weight.shape[1], channels=dim
    )
    return convolution_implementation(call)(
        x,
        weight,
        bias,
        activation=activation,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )


def causal_conv1d_step(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str | None = "silu"
) -> Tensor:
    """One token of `causal_conv1d`, for decoding; updates the state in place and is not differentiable.

    Args:
        x: [B, D]; bf16, fp16 or fp32.
        state: the W - 1 inputs before this one [B, D, W - 1], oldest first, in x's dtype or fp32, updated in place.
        weight: [D, W], in x's dtype or fp32.
        bias: [D], in the weight's dtype, or None.
        activation: "silu" or None.

    Returns:
        y [B, D] in x's dtype.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, an unknown activation.
    """
    checks.check_tensors({"x": x, "weight": weight})
    checks.require(x.dim() == 2, f"x has {x.dim()} dimensions, expected 2")
    _check_filter(x, weight, bias, x.shape[1], activation)
    _check_window(x, state, (*x.shape, weight.shape[1] - 1))
    with torch.no_grad():
        return implementation("causal_conv1d_step", x.device.type)(x, state, weight, bias, activation=activation)


def _check_filter(x: Tensor, weight: Tensor, bias: Tensor | None, dim: int, activation: str | None) -> None:
    checks.require(
        weight.dim() == 2 and weight.shape[1] > 0, f"weight has shape {tuple(weight.shape)}, expected [D, W]"
    )
    checks.check_shapes({"weight": (weight, (dim, weight.shape[1]))})
    checks.check_dtypes({"x": x}, {})
    checks.require(
        weight.dtype in (x.dtype, torch.float32),
        f"weight has dtype {weight.dtype}, expected {x.dtype} (as x) or torch.float32",
    )
    checks.require(weight.device == x.device, f"weight is on {weight.device}, but x is on {x.device}")
    if bias is not None:
        checks.check_shapes({"bias": (bias, (dim,))})
        checks.check_dtypes({"weight": weight, "bias": bias}, {})
    checks.require(
        activation in checks.ACTIVATIONS, f"activation is {activation!r}, expected one of {checks.ACTIVATIONS}"
    )


def _check_window(x: Tensor, state: Tensor, shape: tuple[int, int, int]) -> None:
    checks.check_shapes({"state": (state, shape)})
    checks.require(
        state.dtype in (x.dtype, torch.float32),
        f"state has dtype {state.dtype}, expected {x.dtype} (as x) or torch.float32",
    )
    checks.require(state.device == x.device, f"state is on {state.device}, but x is on {x.device}")
