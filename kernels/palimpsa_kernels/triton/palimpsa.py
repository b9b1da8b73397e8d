"""Palimpsa's chunked scan in Triton as one differentiable function.

For the backward pass the inputs and the states at the chunks' ends are kept, 2 K V fp32 a head and chunk; everything
else is computed anew.
"""

from typing import Any

import torch
from torch import Tensor

from palimpsa_kernels.carry import Carry
from palimpsa_kernels.triton.chunks import make_chunks
from palimpsa_kernels.triton.decay import chunk_decays, make_spans
from palimpsa_kernels.triton.elementwise import elementwise_gradients
from palimpsa_kernels.triton.incoming import add_incoming, decay_gradient
from palimpsa_kernels.triton.launches import next_power_of_2, tokens_adjacent
from palimpsa_kernels.triton.readout import readout
from palimpsa_kernels.triton.states import (
    chunk_states,
    hand_back,
    pass_adjoints,
    pass_states,
    take_over,
    to_internal,
    to_public,
)
from palimpsa_kernels.triton.tiles import pack_query_key

SPAN_GROWTH = {torch.float32: 16.0}  # of a state that is run backwards, see `decay`
DEFAULT_SPAN_GROWTH = 1024.0
MAX_SPLITS = 4
MAX_CHUNK = 1024  # offsets inside of a chunk are 32 bits wide


def default_chunk_size(tokens: int, heads: int) -> int:
    """Long chunks mean few stored states, short ones enough programs to fill the device."""
    return min(128, max(64, next_power_of_2(tokens * heads // 8192 + 1) // 2))


class ChunkPalimpsa(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_alpha: Tensor, prior: Tensor,
        initial_mean: Tensor | None, initial_importance: Tensor | None, cu_seqlens: Tensor | None, scale: float,
        chunk_size: int | None, output_final_state: bool, carry: Carry | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        batch, tokens, heads, value_dim = v.shape
        q, k, v, beta = (tokens_adjacent(x) for x in (q, k, v, beta))
        log_alpha, prior = log_alpha.contiguous(), prior.contiguous()
        chunks = make_chunks(
            batch, tokens, cu_seqlens, min(chunk_size or default_chunk_size(batch * tokens, heads), MAX_CHUNK),
            q.device, goes_on=carry is not None and carry.goes_on,
        )  # fmt: skip
        initial = None
        if initial_mean is not None and initial_importance is not None:
            initial = to_internal((initial_mean, initial_importance))
        final = None
        if output_final_state:
            final = torch.empty(chunks.documents, 2, heads, k.shape[3], value_dim, device=q.device)

        to_end, total = chunk_decays(log_alpha, chunks)
        states = chunk_states(k, v, beta, to_end, chunks)
        carried = None if carry is None else take_over(carry, states, total, chunks)
        pass_states(states, total, chunks, initial if carry is None else carried, final)
        spans = make_spans(log_alpha, prior, chunks, SPAN_GROWTH.get(q.dtype, DEFAULT_SPAN_GROWTH))
        y = (torch.empty if cu_seqlens is None else torch.zeros)(v.shape, device=v.device, dtype=v.dtype)
        readout(pack_query_key(q, k, scale), v, beta, log_alpha, spans, prior, states, initial, chunks, y)

        ctx.save_for_backward(q, k, v, beta, log_alpha, prior, states, initial, carried)
        ctx.chunks, ctx.scale, ctx.carry = chunks, scale, carry
        ctx.set_materialize_grads(False)
        return y, *(to_public(final) if final is not None else (None, None))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, beta, log_alpha, prior, states, initial, carried = ctx.saved_tensors
        chunks = ctx.chunks
        batch, tokens, groups, key_dim = k.shape
        dy = torch.zeros_like(v) if grads[0] is None else tokens_adjacent(grads[0])
        final_adjoint = None
        if grads[1] is not None or grads[2] is not None:
            shape = (chunks.documents, v.shape[2], v.shape[3], key_dim)
            final_adjoint = to_internal(tuple(states.new_zeros(shape) if g is None else g for g in grads[1:3]))

        to_end, total = chunk_decays(log_alpha, chunks)
        spans = make_spans(log_alpha, prior, chunks, SPAN_GROWTH.get(q.dtype, DEFAULT_SPAN_GROWTH))
        splits = min(MAX_SPLITS, v.shape[2] // groups)
        dk_parts = states.new_zeros(1 + 2 * splits, batch, tokens, groups, key_dim)
        own = elementwise_gradients(
            q, k, v, beta, dy, log_alpha, spans, prior, ctx.scale, states, initial, chunks,
            dk_parts[0], prior_gradient=ctx.needs_input_grad[5],
        )  # fmt: skip
        if ctx.carry is not None:
            final_adjoint = hand_back(ctx.carry, own.adjoints, total, chunks, final_adjoint)
        initial_adjoint, products = pass_adjoints(
            own.adjoints, states, total, chunks, initial if ctx.carry is None else carried, final_adjoint
        )
        (dv, dbeta), inner = add_incoming(
            k, [v, beta], to_end, chunks, own.adjoints, [own.dv_parts, own.dbeta_parts],
            dk_parts[1:].unflatten(0, (2, splits)),
        )  # fmt: skip
        dlog_alpha = decay_gradient(own.dlog_alpha_parts, products, inner, chunks)
        dk = dk_parts.sum(0).to(k.dtype)
        dprior = None if own.dprior_parts is None else own.dprior_parts.sum((0, 2))
        d_initial = (None, None) if initial is None else to_public(initial_adjoint)
        return own.dq, dk, dv, dbeta, dlog_alpha, dprior, *d_initial, None, None, None, None, None


def chunk_palimpsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_alpha: Tensor,
    prior: Tensor,
    *,
    scale: float = 1.0,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor]]:
    """See `palimpsa_kernels.chunk_palimpsa`."""
    initial_mean, initial_importance = initial_state or (None, None)
    y, mean, importance = ChunkPalimpsa.apply(
        q, k, v, beta, log_alpha, prior, initial_mean, initial_importance, cu_seqlens, scale, chunk_size,
        output_final_state,
    )  # fmt: skip
    return (y, (mean, importance)) if output_final_state else y
