"""States at the chunks' ends: what each chunk adds, by matrix products, and the passing from chunk to chunk.

Internal layout of states: [places, S, H, K, V], V contiguous; S = 2 (M, Ibar) in fp32 for Palimpsa, whose readout
divides by them, and S = 1 (M) for Mamba2, in bf16 for bf16 inputs: matrix products take them so anyway.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from palimpsa_kernels.carry import Carry
from palimpsa_kernels.triton.chunks import Chunks
from palimpsa_kernels.triton.launches import cdiv, next_power_of_2
from palimpsa_kernels.triton.primitives import chunk_bounds, chunk_document

BLOCK_T = 32


@triton.jit
def split(x):
    """fp32 as the sum of two bf16, within 2^-17."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def exact_dot(a, b, accumulator, SPLIT: tl.constexpr):
    """accumulator + a @ b, b in fp32, a in fp32 or the inputs' dtype: within 1e-5, or about as exact as fp32."""
    if SPLIT:
        b_high, b_low = split(b)
        if a.dtype == tl.bfloat16:
            return tl.dot(a, b_high, tl.dot(a, b_low, accumulator))
        else:
            a_high, a_low = split(a)
            accumulator = tl.dot(a_high, b_low, tl.dot(a_low, b_high, accumulator))
            return tl.dot(a_high, b_high, accumulator)
    else:
        return tl.dot(a.to(tl.float32), b, accumulator, input_precision="tf32x3")


@triton.jit
def chunk_state_kernel(
    k, v, beta, to_end, table, states, H, heads_per_group, stride_k, stride_v, stride_beta,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
    IMPORTANCE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    PARTS_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    offs_k = (tl.program_id(2) // PARTS_V) * BLOCK_K + tl.arange(0, BLOCK_K)
    offs_v = (tl.program_id(2) % PARTS_V) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside_k = offs_k < K
    inside_v = offs_v < V
    start, end = chunk_bounds(table, chunk)
    document, _first = chunk_document(table, chunk)
    mean = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    importance = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    for base in range(start, end, BLOCK_T):
        t = base + tl.arange(0, BLOCK_T)
        inside = t < end
        key = tl.load(
            k + t[None, :] * stride_k + (head // heads_per_group) * K + offs_k[:, None],
            mask=inside[None, :] & inside_k[:, None], other=0.0,
        )  # fmt: skip
        decay = tl.exp(tl.load(to_end + t * H + head, mask=inside, other=-float("inf")))
        at_v = head * V + offs_v[None, :]
        mask_v = inside[:, None] & inside_v[None, :]
        value = tl.load(v + t[:, None] * stride_v + at_v, mask=mask_v, other=0.0).to(tl.float32)
        mean = exact_dot(key, value * decay[:, None], mean, SPLIT)
        if IMPORTANCE:
            precision = tl.load(beta + t[:, None] * stride_beta + at_v, mask=mask_v, other=0.0).to(tl.float32)
            square = key.to(tl.float32) * key.to(tl.float32)
            importance = exact_dot(square, precision * decay[:, None], importance, SPLIT)
    STATES: tl.constexpr = 2 if IMPORTANCE else 1
    tile = states + ((chunk.to(tl.int64) * STATES) * H + head) * K * V + offs_k[:, None] * V + offs_v[None, :]
    mask = inside_k[:, None] & inside_v[None, :] & (document >= 0)
    tl.store(tile, mean.to(states.dtype.element_ty), mask=mask)
    if IMPORTANCE:
        tl.store(tile + H * K * V, importance.to(states.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["initials"])
def pass_states_kernel(
    states, total, first_chunks, initial, final, H, initials,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, STATES: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr,
    STORE: tl.constexpr,
):  # fmt: skip
    document = tl.program_id(0)
    row = tl.program_id(1)
    head = row % H
    offs = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < SIZE
    at_document = (document.to(tl.int64) * STATES * H + row) * SIZE + offs
    state = tl.zeros([BLOCK], tl.float32)
    if HAS_INITIAL:
        state += tl.load(initial + at_document, mask=inside & (document < initials), other=0.0)
    first = tl.load(first_chunks + document).to(tl.int64)
    count = tl.load(first_chunks + document + 1) - first.to(tl.int32)
    for i in tl.range(0, count, num_stages=3):
        tile = states + ((first + i) * STATES * H + row) * SIZE + offs
        decay = tl.exp(tl.load(total + (first + i) * H + head))
        state = decay * state + tl.load(tile, mask=inside, other=0.0).to(tl.float32)
        if STORE:
            tl.store(tile, state.to(states.dtype.element_ty), mask=inside)
    if HAS_FINAL:
        tl.store(final + at_document, state, mask=inside)


@triton.jit(do_not_specialize=["initials", "first_final"])
def pass_adjoints_kernel(
    adjoints, states, total, first_chunks, initial, final_adjoint, initial_adjoint, products, H, initials, first_final,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, STATES: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    document = tl.program_id(0)
    row = tl.program_id(1)
    head = row % H
    block = tl.program_id(2)
    offs = block * BLOCK + tl.arange(0, BLOCK)
    inside = offs < SIZE
    at_document = (document.to(tl.int64) * STATES * H + row) * SIZE + offs
    if HAS_FINAL:
        at_final = ((document - first_final).to(tl.int64) * STATES * H + row) * SIZE + offs
        adjoint = tl.load(final_adjoint + at_final, mask=inside & (document >= first_final), other=0.0)
    else:
        adjoint = tl.zeros([BLOCK], tl.float32)
    first = tl.load(first_chunks + document).to(tl.int64)
    count = tl.load(first_chunks + document + 1) - first.to(tl.int32)
    for i in tl.range(0, count, num_stages=3):
        chunk = first + (count - 1 - i)
        at = (chunk * STATES * H + row) * SIZE + offs
        decay = tl.exp(tl.load(total + chunk * H + head))
        own = tl.load(adjoints + at, mask=inside, other=0.0).to(tl.float32)
        if STORE:
            before = tl.load(states + at - STATES * H * SIZE, mask=inside & (i + 1 < count), other=0.0).to(tl.float32)
            if HAS_INITIAL:
                given = inside & (i + 1 == count) & (document < initials)
                before += tl.load(initial + at_document, mask=given, other=0.0)
            tl.store(adjoints + at, adjoint.to(adjoints.dtype.element_ty), mask=inside)
        adjoint *= decay
        if STORE:
            product = tl.sum(adjoint * before)
            tl.store(products + (chunk * STATES * H + row) * tl.num_programs(2) + block, product)
        adjoint += own
    tl.store(initial_adjoint + at_document, adjoint, mask=inside & (document < initials))


def to_internal(state: tuple[Tensor, ...]) -> Tensor:
    """Public states [N, H, V, K] to [N, S, H, K, V]."""
    return torch.stack([x.transpose(-1, -2) for x in state], 1)


def to_public(state: Tensor) -> tuple[Tensor, ...]:
    """[N, S, H, K, V] to S states [N, H, V, K]."""
    return tuple(x.transpose(-1, -2).contiguous() for x in state.unbind(1))


def chunk_states(
    k: Tensor, v: Tensor, beta: Tensor | None, to_end: Tensor, chunks: Chunks, dtype: torch.dtype = torch.float32
) -> Tensor:
    """What each chunk adds to the states at its end, [places, S, H, K, V] in the given dtype.

    Kernels take a chunk that is not the first of its document to start from the place before its own. Before the first
    place there is one more (`place_before`), for what goes on from another part of the row.
    """
    groups, key_dim = k.shape[2:]
    heads, value_dim = v.shape[2:]
    block_k = max(16, min(128, next_power_of_2(key_dim)))
    block_v = max(16, min(64, next_power_of_2(value_dim)))
    kinds = 1 if beta is None else 2
    states = torch.empty(1 + chunks.places, kinds, heads, key_dim, value_dim, device=v.device, dtype=dtype)[1:]
    grid = (chunks.places, heads, cdiv(key_dim, block_k) * cdiv(value_dim, block_v))
    chunk_state_kernel[grid](
        k, v, v if beta is None else beta, to_end, chunks.table, states, heads, heads // groups,
        k.stride(1), v.stride(1), v.stride(1) if beta is None else beta.stride(1),
        K=key_dim, V=value_dim, BLOCK_K=block_k, BLOCK_V=block_v, BLOCK_T=BLOCK_T,
        IMPORTANCE=beta is not None, SPLIT=v.dtype == torch.bfloat16, num_warps=8,
    )  # fmt: skip
    return states


def place_before(states: Tensor) -> Tensor:
    """Of the states of `chunk_states`, the place before the first [S, H, K, V]."""
    return states.as_strided(states.shape[1:], states.stride()[1:], states.storage_offset() - states.stride(0))


def pass_states(
    states: Tensor, total: Tensor, chunks: Chunks, initial: Tensor | None, final: Tensor | None, *, store: bool = True
) -> None:
    """Turn what each chunk adds into the state at its end, in place; unless `store`, only `final` is written.

    Args:
        initial: of as many documents, from the first, as it holds [<= N, S, H, K, V].
        final: takes the states behind the documents [N, S, H, K, V].
    """
    size, block, grid = _grid(states, chunks)
    pass_states_kernel[grid](
        states, total, chunks.first_chunks, states if initial is None else initial, states if final is None else final,
        states.shape[2], 0 if initial is None else len(initial), SIZE=size, BLOCK=block, STATES=states.shape[1],
        HAS_INITIAL=initial is not None, HAS_FINAL=final is not None, STORE=store, num_warps=4,
    )  # fmt: skip


def pass_adjoints(
    adjoints: Tensor,
    states: Tensor,
    total: Tensor,
    chunks: Chunks,
    initial: Tensor | None,
    final_adjoint: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Turn each chunk's own adjoint of the state before it into the adjoint that enters at its end, in place.

    Args:
        initial: of as many documents, from the first, as it holds [<= N, S, H, K, V].
        final_adjoint: of as many documents, up to the last, as it holds [<= N, S, H, K, V].

    Returns:
        The adjoint of the initial states as `initial`, and of each chunk the product of the state before it with its
        decayed incoming adjoint, in parts [places, S, H, parts].
    """
    size, block, grid = _grid(states, chunks)
    initials = 0 if initial is None else len(initial)
    initial_adjoint = total.new_empty(initials, *states.shape[1:])
    products = total.new_empty(chunks.places, *states.shape[1:3], grid[2])
    first_final = chunks.documents if final_adjoint is None else chunks.documents - len(final_adjoint)
    pass_adjoints_kernel[grid](
        adjoints, states, total, chunks.first_chunks, states if initial is None else initial,
        states if final_adjoint is None else final_adjoint, initial_adjoint, products, states.shape[2], initials,
        first_final, SIZE=size, BLOCK=block, STATES=states.shape[1],
        HAS_INITIAL=initial is not None, HAS_FINAL=final_adjoint is not None, STORE=True, num_warps=4,
    )  # fmt: skip
    return initial_adjoint, products


def _grid(states: Tensor, chunks: Chunks) -> tuple[int, int, tuple[int, int, int]]:
    kinds, heads, key_dim, value_dim = states.shape[1:]
    size = key_dim * value_dim
    block = min(1024, next_power_of_2(size))
    return size, block, (chunks.documents, kinds * heads, cdiv(size, block))


def take_over(carry: Carry, states: Tensor, total: Tensor, chunks: Chunks) -> Tensor | None:
    """What the first document starts from where the row has parts before, [1, S, H, K, V], also put before the first
    place; None where no part before has tokens of it. `states` are what each chunk adds."""
    end = total.new_zeros(1, *states.shape[1:])
    if carry.goes_off:
        pass_states(states, total, chunks.last_document, None, end, store=False)
    start = carry.from_before(end[0], total.sum(0).exp())
    if not carry.goes_on:
        return None
    place_before(states).copy_(start)
    return start.unsqueeze(0).contiguous()


def hand_back(
    carry: Carry, adjoints: Tensor, total: Tensor, chunks: Chunks, final_adjoint: Tensor | None
) -> Tensor | None:
    """`final_adjoint` [N, S, H, K, V] and what comes to the last document from the parts behind, of the last document
    alone where None is given; `adjoints` are each chunk's own of the state before it."""
    start = total.new_zeros(1, *adjoints.shape[1:])
    if carry.goes_on:
        size, block, grid = _grid(adjoints, chunks.first_document)
        pass_adjoints_kernel[grid](
            adjoints, adjoints, total, chunks.first_document.first_chunks, adjoints, adjoints, start, start,
            adjoints.shape[2], 1, 1, SIZE=size, BLOCK=block, STATES=adjoints.shape[1],
            HAS_INITIAL=False, HAS_FINAL=False, STORE=False, num_warps=4,
        )  # fmt: skip
    behind = carry.from_behind(start[0])
    if not carry.goes_off:
        return final_adjoint
    if final_adjoint is None:
        return behind.unsqueeze(0).contiguous()
    final_adjoint[-1] += behind
    return final_adjoint
