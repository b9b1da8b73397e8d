"""The activations around the scans, one pass forward and one backward; formulas in `palimpsa_kernels.activations`.

Programs take a block of tokens of one head. Sums over tokens, for the parameters, are stored a block each and added up
in a fixed order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from palimpsa_kernels.activations import LOWEST_LOG_ALPHA
from palimpsa_kernels.triton.launches import cdiv, next_power_of_2

ELEMENTS = 4096  # of a head's values a program
LOWEST = tl.constexpr(LOWEST_LOG_ALPHA)


@triton.jit
def log_one_plus(x):
    """log(1 + x) for 0 <= x <= 1, within 2e-7: twice the series of artanh(x / (2 + x))."""
    s = x / (2.0 + x)
    z = s * s
    series = 1.0 / 15 + z * (1.0 / 17 + z * (1.0 / 19))
    series = 1.0 / 9 + z * (1.0 / 11 + z * (1.0 / 13 + z * series))
    series = 1.0 + z * (1.0 / 3 + z * (1.0 / 5 + z * (1.0 / 7 + z * series)))
    return 2.0 * s * series


@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0) + log_one_plus(tl.exp(-tl.abs(x)))


@triton.jit
def step_of(dt, dt_bias, t, inside, head, stride):
    """dt before and behind its softplus."""
    raw = tl.load(dt + t * stride + head, mask=inside, other=0.0).to(tl.float32) + tl.load(dt_bias + head)
    return raw, softplus(raw)


@triton.jit
def write_of(strength, step, t, inside, head, stride, STRENGTH: tl.constexpr):
    """How strongly a token is written."""
    if STRENGTH:
        return tl.sigmoid(tl.load(strength + t * stride + head, mask=inside, other=0.0).to(tl.float32))
    else:
        return step


@triton.jit(do_not_specialize=["tokens"])
def activate_kernel(
    x, dt, strength, logits, dt_bias, A_log, b_scale, value, beta, log_alpha, tokens, H,
    stride_x, stride_dt, stride_strength, stride_logits,
    V: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, IMPORTANCE: tl.constexpr, STRENGTH: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % H
    t = (tl.program_id(0) // H).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = t < tokens
    offs = tl.arange(0, BLOCK_V)
    mask = inside[:, None] & (offs < V)[None, :]
    within = head * V + offs[None, :]
    at = t[:, None] * H * V + within
    _raw, step = step_of(dt, dt_bias, t, inside, head, stride_dt)
    decay = -step * tl.exp(tl.load(A_log + head))
    tl.store(log_alpha + t * H + head, tl.where(decay < LOWEST, LOWEST, decay), mask=inside)
    write = write_of(strength, step, t, inside, head, stride_strength, STRENGTH)
    given = tl.load(x + t[:, None] * stride_x + within, mask=mask, other=0.0).to(tl.float32)
    tl.store(value + at, (given * write[:, None]).to(value.dtype.element_ty), mask=mask)
    if IMPORTANCE:
        gate = tl.sigmoid(tl.load(logits + t[:, None] * stride_logits + within, mask=mask, other=0.0).to(tl.float32))
        precision = gate * (softplus(tl.load(b_scale + head)) * write)[:, None]
        tl.store(beta + at, precision.to(beta.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def activation_gradient_kernel(
    x, dt, strength, logits, dt_bias, A_log, b_scale, D, dvalue, dbeta, dlog_alpha, dy,
    dx, ddt, dstrength, dlogits, parts, tokens, H, stride_x, stride_dt, stride_strength, stride_logits, stride_dy,
    V: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
    IMPORTANCE: tl.constexpr, STRENGTH: tl.constexpr, HAS_DY: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % H
    block = (tl.program_id(0) // H).to(tl.int64)
    t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = t < tokens
    offs = tl.arange(0, BLOCK_V)
    mask = inside[:, None] & (offs < V)[None, :]
    within = head * V + offs[None, :]
    at = t[:, None] * H * V + within
    own = parts + (block * 4) * H + head

    raw, step = step_of(dt, dt_bias, t, inside, head, stride_dt)
    rate = tl.exp(tl.load(A_log + head))
    unlimited = -step * rate >= LOWEST
    d_decay = tl.load(dlog_alpha + t * H + head, mask=inside, other=0.0)
    d_decay = tl.where(unlimited, d_decay, 0.0)
    tl.store(own, tl.sum(-d_decay * step * rate, axis=0))

    write = write_of(strength, step, t, inside, head, stride_strength, STRENGTH)
    given = tl.load(x + t[:, None] * stride_x + within, mask=mask, other=0.0).to(tl.float32)
    d_value = tl.load(dvalue + at, mask=mask, other=0.0).to(tl.float32)
    d_given = d_value * write[:, None]
    if HAS_DY:
        d_out = tl.load(dy + t[:, None] * stride_dy + within, mask=mask, other=0.0).to(tl.float32)
        d_given += tl.load(D + head) * d_out
        tl.store(own + H, tl.sum(tl.sum(d_out * given, axis=1), axis=0))
    else:
        tl.store(own + H, 0.0)
    tl.store(dx + at, d_given.to(dx.dtype.element_ty), mask=mask)

    d_write = tl.sum(d_value * given, axis=1)
    d_step = -d_decay * rate
    if IMPORTANCE:
        gate = tl.sigmoid(tl.load(logits + t[:, None] * stride_logits + within, mask=mask, other=0.0).to(tl.float32))
        gated = tl.load(dbeta + at, mask=mask, other=0.0).to(tl.float32) * gate
        scale = softplus(tl.load(b_scale + head))
        d_logits = gated * (1.0 - gate) * (scale * write)[:, None]
        tl.store(dlogits + at, d_logits.to(dlogits.dtype.element_ty), mask=mask)
        of_token = tl.sum(gated, axis=1)
        d_write += scale * of_token
        tl.store(own + 2 * H, tl.sum(of_token * write, axis=0) * tl.sigmoid(tl.load(b_scale + head)))
    if STRENGTH:
        d_strength = d_write * write * (1.0 - write)
        tl.store(dstrength + t * H + head, d_strength.to(dstrength.dtype.element_ty), mask=inside)
    else:
        d_step += d_write
    d_raw = d_step * tl.sigmoid(raw)
    tl.store(ddt + t * H + head, d_raw.to(ddt.dtype.element_ty), mask=inside)
    tl.store(own + 3 * H, tl.sum(tl.where(inside, d_raw, 0.0), axis=0))


@triton.jit(do_not_specialize=["tokens"])
def skip_kernel(
    y, x, D, tokens, H, stride_x, V: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % H
    t = (tl.program_id(0) // H).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs = tl.arange(0, BLOCK_V)
    mask = (t < tokens)[:, None] & (offs < V)[None, :]
    within = head * V + offs[None, :]
    at = y + t[:, None] * H * V + within
    skip = tl.load(x + t[:, None] * stride_x + within, mask=mask, other=0.0).to(tl.float32) * tl.load(D + head)
    out = tl.load(at, mask=mask, other=0.0).to(tl.float32) + skip
    tl.store(at, out.to(y.dtype.element_ty), mask=mask)


def tile(value_dim: int) -> dict[str, int]:
    """Compile-time sizes of a program."""
    block = next_power_of_2(value_dim)
    return {"V": value_dim, "BLOCK_T": max(1, ELEMENTS // block), "BLOCK_V": block}


@dataclass(frozen=True)
class Raw:
    """What goes into the activations, all that has tokens with adjacent ones (`tokens_adjacent`).

    Attributes:
        x: [B, T, H, V].
        dt: [B, T, H].
        strength: as dt; None where dt is how strongly a token is written.
        logits: as x; None, like b_scale, without importance.
        dt_bias, A_log, D, b_scale: [H] fp32.
    """

    x: Tensor
    dt: Tensor
    strength: Tensor | None
    logits: Tensor | None
    dt_bias: Tensor
    A_log: Tensor
    D: Tensor
    b_scale: Tensor | None


@dataclass(frozen=True)
class RawGradients:
    """Attributes: gradients to the fields of `Raw` of the same names."""

    x: Tensor
    dt: Tensor
    strength: Tensor | None
    logits: Tensor | None
    dt_bias: Tensor
    A_log: Tensor
    D: Tensor
    b_scale: Tensor | None


def activate(raw: Raw) -> tuple[Tensor, Tensor | None, Tensor]:
    """v and beta [B, T, H, V] (None without importance) in x's dtype, log_alpha [B, T, H] fp32."""
    batch, tokens, heads, value_dim = raw.x.shape
    x, logits, strength = raw.x, given_or(raw.logits, raw.x), given_or(raw.strength, raw.dt)
    value = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    beta = None if raw.logits is None else torch.empty_like(value)
    log_alpha = torch.empty(batch, tokens, heads, device=x.device)
    sizes = tile(value_dim)
    activate_kernel[(cdiv(batch * tokens, sizes["BLOCK_T"]) * heads,)](
        x, raw.dt, strength, logits, raw.dt_bias, raw.A_log, given_or(raw.b_scale, raw.D), value, given_or(beta, value),
        log_alpha, batch * tokens, heads, x.stride(1), raw.dt.stride(1), strength.stride(1), logits.stride(1),
        IMPORTANCE=beta is not None, STRENGTH=raw.strength is not None, **sizes,
    )  # fmt: skip
    return value, beta, log_alpha


def given_or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A kernel wants a pointer also where it reads none."""
    return other if tensor is None else tensor


def add_skip(y: Tensor, raw: Raw) -> None:
    """y [B, T, H, V] += D * x, in place."""
    batch, tokens, heads, value_dim = raw.x.shape
    sizes = tile(value_dim)
    skip_kernel[(cdiv(batch * tokens, sizes["BLOCK_T"]) * heads,)](
        y, raw.x, raw.D, batch * tokens, heads, raw.x.stride(1), **sizes
    )


def activation_gradients(
    raw: Raw, dvalue: Tensor, dbeta: Tensor | None, dlog_alpha: Tensor, dy: Tensor | None
) -> RawGradients:
    """From the scan's gradients to v, beta and log_alpha, and dy [B, T, H, V], which reaches D * x unchanged.

    Args:
        dvalue, dbeta: [B, T, H, V]; dbeta is None without importance.
        dlog_alpha: [B, T, H].
        dy: with adjacent tokens; None counts as zeros.
    """
    batch, tokens, heads, value_dim = raw.x.shape
    x, logits, strength = raw.x, given_or(raw.logits, raw.x), given_or(raw.strength, raw.dt)
    dvalue, dlog_alpha = dvalue.contiguous(), dlog_alpha.contiguous()
    dbeta = None if dbeta is None else dbeta.contiguous()
    dx = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    ddt = torch.empty(raw.dt.shape, device=x.device, dtype=raw.dt.dtype)
    dstrength = None if raw.strength is None else torch.empty(ddt.shape, device=x.device, dtype=strength.dtype)
    dlogits = None if raw.logits is None else torch.empty_like(dx)
    sizes = tile(value_dim)
    blocks = cdiv(batch * tokens, sizes["BLOCK_T"])
    parts = torch.empty(blocks, 4, heads, device=x.device)
    activation_gradient_kernel[(blocks * heads,)](
        x, raw.dt, strength, logits, raw.dt_bias, raw.A_log, given_or(raw.b_scale, raw.D), raw.D, dvalue,
        given_or(dbeta, dvalue), dlog_alpha, given_or(dy, x), dx, ddt, given_or(dstrength, ddt), given_or(dlogits, dx),
        parts, batch * tokens, heads, x.stride(1), raw.dt.stride(1), strength.stride(1), logits.stride(1),
        given_or(dy, x).stride(1),
        IMPORTANCE=dlogits is not None, STRENGTH=dstrength is not None, HAS_DY=dy is not None, **sizes,
    )  # fmt: skip
    dA_log, dD, db_scale, ddt_bias = parts.sum(0).unbind(0)
    return RawGradients(dx, ddt, dstrength, dlogits, ddt_bias, dA_log, dD, None if dlogits is None else db_scale)
