"""One token of Palimpsa's elementwise backward pass: its gradients, and how their parts are stored."""

import triton
import triton.language as tl

from palimpsa_kernels.triton.primitives import (
    anew,
    column_sums,
    fast_reciprocal,
    row_copies,
    row_lanes,
    row_sums,
    thread_sums,
)


@triton.jit
def step_back(
    mean, importance, prior_h, query, key, value, precision, d_out, d_mean, d_importance,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add a token's share to the adjoints, behind which all states and `prior_h` are, and read its gradients off them.

    Returns the adjoints, the gradients to q and k as copies, to v and beta as sums within threads, Ibar's share / q.
    """
    reciprocal = fast_reciprocal(importance + prior_h)
    weight = reciprocal * d_out[None, :]
    share = mean * weight
    dq = row_sums(share, tl.full([BLOCK_V], 1.0, tl.float32), BLOCK_K, BLOCK_V, EXACT)
    share *= reciprocal
    d_mean += query[:, None] * weight
    d_importance -= query[:, None] * share
    dk = row_sums(d_mean, value, BLOCK_K, BLOCK_V, EXACT)
    dk += key[:, None] * row_sums(d_importance, 2 * precision, BLOCK_K, BLOCK_V, EXACT)
    dv = thread_sums(d_mean * key[:, None], BLOCK_K, BLOCK_V)
    dbeta = thread_sums(d_importance * (key * key)[:, None], BLOCK_K, BLOCK_V)
    return d_mean, d_importance, dq, dk, dv, dbeta, share


@triton.jit
def store_rows(pointer, dq, dk, mask, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """Parts of dq and dk from two of their copies [BLOCK_K, copies], neighbouring rows of a thread side by side."""
    LANES: tl.constexpr = row_lanes(BLOCK_K, BLOCK_V)
    COPIES: tl.constexpr = row_copies(BLOCK_V)
    first = (tl.arange(0, COPIES) == 0)[None, :]
    rows = tl.reshape(tl.where(first, dq, dk), [BLOCK_K // LANES, LANES, COPIES])
    tl.store(pointer, tl.permute(rows, (2, 1, 0)).to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def column_pointers(dv, dbeta, BLOCK_V: tl.constexpr):
    """Where the elements of `column_sums` go. To be formed for each piece of work, not kept in registers over all."""
    KEPT: tl.constexpr = BLOCK_V // 16
    ROWS: tl.constexpr = 4 // KEPT
    row = anew(tl.arange(0, 2 * ROWS))[:, None, None]
    offs = tl.arange(0, BLOCK_V // 4)[None, :, None] * 4 + row % ROWS * KEPT + tl.arange(0, KEPT)[None, None, :]
    return tl.where(row < ROWS, dv, dbeta) + offs


@triton.jit
def store_columns(
    dv_pointer, dbeta_pointer, at, dv, dbeta, factor, columns, BLOCK_V: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """Parts of dv and dbeta from the partial sums of `thread_sums`; EXACT below `columns` of BLOCK_V.

    Otherwise `dv_pointer` holds the `column_pointers` of both.
    """
    if EXACT:
        offs = tl.arange(0, BLOCK_V)
        inside = offs < columns
        tl.store(dv_pointer + at + offs, (tl.sum(dv, axis=0) * factor).to(dv_pointer.dtype.element_ty), mask=inside)
        dbeta = tl.sum(dbeta, axis=0) * factor
        tl.store(dbeta_pointer + at + offs, dbeta.to(dbeta_pointer.dtype.element_ty), mask=inside)
    else:
        sums = (column_sums(dv, dbeta, BLOCK_V) * factor).to(dv_pointer.dtype.element_ty)
        tl.store(dv_pointer + at, sums)


@triton.jit
def product_sum(d_mean, mean, d_importance, importance, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """<dM, M> + <dIbar, Ibar> over the tile."""
    return tl.sum(
        thread_sums(d_mean * mean, BLOCK_K, BLOCK_V) + thread_sums(d_importance * importance, BLOCK_K, BLOCK_V)
    )
