"""Palimpsa's scan in PyTorch: the chunks of a segment walk side by side, states are passed from chunk to chunk.

The readout divides state by state, so every token's states have to exist. Three parts keep that fast and small:

1. what a chunk adds to the states is a matrix product; passing it on gives the states before each chunk;
2. a loop over the tokens of a chunk carries the states of all chunks of a segment at once (the "walk");
3. backward repeats 1, walks forward keeping the states of the segment, and walks back from a zero adjoint; the adjoint
   that reaches a chunk from behind is passed on like the states and acts through matrix products.

Memory beyond inputs and outputs: the working set of one segment and, for backward, the states before each segment.

The two states are stacked, index 0 for M (driven by v and k) and 1 for Ibar (driven by beta and k ** 2).
README.md derives the adjoints and says why nothing is divided by alpha.

Shapes: m chunks of a segment, L tokens of a chunk, G groups, H heads, K and V as everywhere. In a walk the lanes
N = m * H come last, so that every operation runs over long contiguous rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from palimpsa_kernels.packing import Chunks

CHUNK_SIZE = 16
SEGMENT_ELEMENTS = 65536  # of one state over all lanes: the few arrays a walk touches at once then fit a core's cache


@dataclass(frozen=True)
class _Segment:
    """Inputs of successive chunks, heads first for matrix products.

    Attributes:
        values: v and beta [2, m, H, L, V].
        keys: k and k ** 2 [2, m, H, L, K].
        queries: [m, H, L, K].
        log_alpha: [m, H, L].
        prior: [H].
    """

    values: Tensor
    keys: Tensor
    queries: Tensor
    log_alpha: Tensor
    prior: Tensor

    @classmethod
    def of(cls, part: range, inputs: list[Tensor], prior: Tensor) -> "_Segment":
        """Cut the chunks of `part` out of the chunked q, k, v, beta, log_alpha [n, L, G or H, ...]."""
        q, k, v, beta, log_alpha = (x[part.start : part.stop] for x in inputs)
        q_mHLK, k_mHLK = (x.repeat_interleave(v.shape[2] // x.shape[2], 2).transpose(1, 2) for x in (q, k))
        return cls(
            values=torch.stack([v, beta]).transpose(2, 3),
            keys=torch.stack([k_mHLK, k_mHLK**2]),
            queries=q_mHLK,
            log_alpha=log_alpha.transpose(1, 2),
            prior=prior,
        )

    def __len__(self) -> int:
        return len(self.queries)

    def decays(self) -> tuple[Tensor, Tensor]:
        """Decay of a whole chunk [m, 1, H, 1, 1] and from each of its tokens to its end [m, H, L, 1]."""
        c = self.log_alpha.double().cumsum(-1)
        whole, to_end = (x.to(self.log_alpha.dtype).exp() for x in (c[..., -1], c[..., -1:] - c))
        return whole[:, None, :, None, None], to_end[..., None]

    def added_states(self, to_end: Tensor) -> Tensor:
        """What each chunk adds to the states [m, 2, H, V, K]."""
        return ((self.values * to_end).mT @ self.keys).transpose(0, 1)


class _Lanes:
    """The inputs of a walk, a list entry for each token of a chunk, lanes last.

    Attributes:
        values: v and beta, each [2, 1, V, N].
        keys: k and k ** 2, each [2, K, 1, N].
        queries: each [K, 1, N].
        alpha: each [N].
        prior: [N].
    """

    def __init__(self, segment: _Segment) -> None:
        self.values = segment.values.permute(3, 0, 4, 1, 2).flatten(3)[:, :, None].contiguous().unbind()
        self.keys = segment.keys.permute(3, 0, 4, 1, 2).flatten(3)[:, :, :, None].contiguous().unbind()
        self.queries = segment.queries.permute(2, 3, 0, 1).flatten(2)[:, :, None].contiguous().unbind()
        self.alpha = segment.log_alpha.permute(2, 0, 1).flatten(1).exp().contiguous().unbind()
        self.prior = segment.prior.repeat(len(segment))

    def __len__(self) -> int:
        return len(self.alpha)

    def advance(self, t: int, states: Tensor, out: Tensor) -> None:
        """Write the states [2, K, V, N] behind token t to `out`, from those before it."""
        torch.mul(states, self.alpha[t], out=out).addcmul_(self.values[t], self.keys[t])


def _to_lanes(states: Tensor) -> Tensor:
    """[m, 2, H, V, K] to [2, K, V, N]."""
    return states.permute(1, 4, 3, 0, 2).flatten(3).contiguous()


def _from_lanes(states: Tensor, chunks: int) -> Tensor:
    """[2, K, V, N] to [m, 2, H, V, K]."""
    return states.unflatten(-1, (chunks, -1)).permute(3, 0, 4, 2, 1).contiguous()


def _walk(lanes: _Lanes, before: Tensor) -> Tensor:
    """Read out every token: y without scale [L, V, N]. Overwrites `before` [2, K, V, N]."""
    states = before
    mean, importance = states
    readout = torch.empty_like(mean)
    y = readout.new_empty(len(lanes), *readout.shape[1:])
    for t in range(len(lanes)):
        lanes.advance(t, states, out=states)
        torch.add(importance, lanes.prior, out=readout)
        torch.div(mean, readout, out=readout).mul_(lanes.queries[t])
        torch.sum(readout, 0, out=y[t])
    return y


@dataclass(frozen=True)
class _WalkGradients:
    """What a walk's tokens get from each other inside their chunk, and the adjoint of the states before it.

    Attributes:
        values: of v and beta [L, 2, V, N].
        keys: of k and k ** 2 [L, 2, K, N].
        queries: [L, K, N].
        log_alpha: [L, N].
        prior: [N].
        before: [2, K, V, N].
    """

    values: Tensor
    keys: Tensor
    queries: Tensor
    log_alpha: Tensor
    prior: Tensor
    before: Tensor


def _walk_back(lanes: _Lanes, before: Tensor, dy: Tensor) -> _WalkGradients:
    """Adjoint of `_walk` for dy [L, V, N], with a zero adjoint behind the chunks."""
    length = len(lanes)
    _, key_dim, value_dim, width = before.shape
    history = before.new_empty(length + 1, *before.shape)
    states = history.unbind()
    states[0].copy_(before)
    for t in range(length):
        lanes.advance(t, states[t], out=states[t + 1])

    grads = _WalkGradients(
        values=before.new_empty(length, 2, value_dim, width),
        keys=before.new_empty(length, 2, key_dim, width),
        queries=before.new_empty(length, key_dim, width),
        log_alpha=before.new_empty(length, width),
        prior=before.new_zeros(width),
        before=torch.zeros_like(before),
    )
    adjoint = grads.before
    dmean, dimportance = adjoint
    reciprocal, weighted = torch.empty_like(dmean), torch.empty_like(dmean)
    product = torch.empty_like(adjoint)
    for t in reversed(range(length)):
        mean, importance = states[t + 1]
        torch.add(importance, lanes.prior, out=reciprocal).reciprocal_()
        torch.mul(reciprocal, dy[t], out=weighted)
        dmean.addcmul_(weighted, lanes.queries[t])
        weighted.mul_(mean)
        torch.sum(weighted, 1, out=grads.queries[t])
        weighted.mul_(reciprocal)
        dimportance.addcmul_(weighted, lanes.queries[t], value=-1)
        grads.prior.sub_((weighted.sum(1) * lanes.queries[t][:, 0]).sum(0))

        torch.sum(torch.mul(adjoint, lanes.keys[t], out=product), 1, out=grads.values[t])
        torch.sum(torch.mul(adjoint, lanes.values[t], out=product), 2, out=grads.keys[t])
        adjoint.mul_(lanes.alpha[t])
        torch.sum(torch.mul(adjoint, states[t], out=product).flatten(0, 2), 0, out=grads.log_alpha[t])
    return grads


def _input_gradients(
    segment: _Segment, walked: _WalkGradients, before: Tensor, behind: Tensor, groups: int
) -> tuple[Tensor, ...]:
    """Add what comes from behind the chunks; gradients of q, k, v, beta, log_alpha [m, L, G or H, ...].

    Args:
        segment, walked: the inputs and what the walk found inside the chunks.
        before: states before each chunk [m, 2, H, V, K].
        behind: adjoint of the states behind each chunk [m, 2, H, V, K].
        groups: G.
    """
    m = len(segment)
    whole, to_end = segment.decays()
    adjoint = behind.transpose(0, 1)
    dvalues_behind = (segment.keys @ adjoint.mT) * to_end
    dkeys = walked.keys.unflatten(-1, (m, -1)).permute(1, 3, 4, 0, 2) + (segment.values * to_end) @ adjoint
    dvalues = walked.values.unflatten(-1, (m, -1)).permute(1, 3, 4, 0, 2) + dvalues_behind
    dqueries = walked.queries.unflatten(-1, (m, -1)).permute(2, 3, 0, 1)

    dlog_alpha = walked.log_alpha.unflatten(-1, (m, -1)).permute(1, 2, 0)
    dlog_alpha = dlog_alpha + (whole * behind * before).sum((1, 3, 4))[..., None]
    dlog_alpha[..., 1:] += (segment.values * dvalues_behind).sum((0, -1)).cumsum(-1)[..., :-1]

    dk = dkeys[0] + 2 * segment.keys[0] * dkeys[1]
    dq, dk = (x.unflatten(1, (groups, -1)).sum(2).transpose(1, 2) for x in (dqueries, dk))
    return dq, dk, dvalues[0].transpose(1, 2), dvalues[1].transpose(1, 2), dlog_alpha.transpose(1, 2)


def _segments(chunks: Chunks, state_elements: int) -> list[range]:
    """Successive chunks, as many together as SEGMENT_ELEMENTS allows and at least one."""
    length = max(1, SEGMENT_ELEMENTS // state_elements)
    return [range(i, min(i + length, len(chunks))) for i in range(0, len(chunks), length)]


class _ChunkPalimpsa(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        log_alpha: Tensor,
        prior: Tensor,
        initial: Tensor,
        scale: float,
        chunks: Chunks,
    ) -> tuple[Tensor, Tensor]:
        inputs = [chunks.split(x) for x in (q, k, v, beta, log_alpha)]
        y = torch.empty_like(inputs[2])
        final = initial.clone()
        state = torch.zeros_like(initial[0])
        carried = []
        for part in _segments(chunks, initial[0, 0].numel()):
            carried.append(state)
            segment = _Segment.of(part, inputs, prior)
            whole, to_end = segment.decays()
            before, state = chunks.pass_states(segment.added_states(to_end), whole, initial, final, part, state)
            y_LVN = _walk(_Lanes(segment), _to_lanes(before))
            y[part.start : part.stop] = y_LVN.unflatten(-1, (len(part), -1)).permute(2, 0, 3, 1)
        ctx.save_for_backward(q, k, v, beta, log_alpha, prior, initial, *carried)
        ctx.scale, ctx.chunks = scale, chunks
        return chunks.merge(y.mul_(scale), v.dtype), final

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy, dfinal = grads
        q, k, v, beta, log_alpha, prior, initial, *carried = ctx.saved_tensors
        chunks: Chunks = ctx.chunks
        inputs = [chunks.split(x) for x in (q, k, v, beta, log_alpha)]
        dy = chunks.split(dy) * ctx.scale
        dinputs = [torch.empty_like(x) for x in inputs]
        dprior = torch.zeros_like(prior)
        dinitial = dfinal.clone()
        adjoint = torch.zeros_like(dfinal[0])
        parts = _segments(chunks, initial[0, 0].numel())
        for part, state in reversed(list(zip(parts, carried, strict=True))):
            segment = _Segment.of(part, inputs, prior)
            whole, to_end = segment.decays()
            before, _ = chunks.pass_states(segment.added_states(to_end), whole, initial, None, part, state)
            dy_LVN = dy[part.start : part.stop].permute(1, 3, 0, 2).flatten(2).contiguous()
            walked = _walk_back(_Lanes(segment), _to_lanes(before), dy_LVN)
            added = _from_lanes(walked.before, len(part))
            behind, adjoint = chunks.pass_adjoints(added, whole, dfinal, dinitial, part, adjoint)
            gradients = _input_gradients(segment, walked, before, behind, k.shape[2])
            for dinput, gradient in zip(dinputs, gradients, strict=True):
                dinput[part.start : part.stop] = gradient
            dprior += walked.prior.view(len(part), -1).sum(0)
        merged = (chunks.merge(d, x.dtype) for d, x in zip(dinputs, (q, k, v, beta, log_alpha), strict=True))
        return *merged, dprior, dinitial, None, None


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
    batch, tokens, heads, value_dim = v.shape
    chunks = Chunks(batch, tokens, cu_seqlens, chunk_size or CHUNK_SIZE, v.device)
    if initial_state is None:
        initial = log_alpha.new_zeros(chunks.documents, 2, heads, value_dim, k.shape[3])
    else:
        initial = torch.stack(initial_state, 1)
    y, final = _ChunkPalimpsa.apply(q, k, v, beta, log_alpha, prior, initial, scale, chunks)
    return (y, (final[:, 0], final[:, 1])) if output_final_state else y


@torch.no_grad()
def palimpsa_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_alpha: Tensor,
    prior: Tensor,
    states: tuple[Tensor, Tensor],
    *,
    scale: float = 1.0,
) -> Tensor:
    """See `palimpsa_kernels.palimpsa_step`."""
    mean, importance = states
    heads_per_group = v.shape[1] // k.shape[1]
    query, key = (x.float().repeat_interleave(heads_per_group, 1)[:, :, None, :] for x in (q, k))
    alpha = log_alpha.exp()[:, :, None, None]
    mean.mul_(alpha).addcmul_(v.float()[..., None], key)
    importance.mul_(alpha).addcmul_(beta.float()[..., None], key * key)
    y = scale * (mean / (prior[:, None, None] + importance) * query).sum(-1)
    return y.to(v.dtype)
