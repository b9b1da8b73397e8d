"""Palimpsa's scan in PyTorch: the chunks of a segment walk side by side, states are passed from chunk to chunk.

The readout divides state by state, so every token's states have to exist. Three parts keep that fast and small:

1. what a chunk adds to the states is a matrix product; passing it on gives the states before each chunk;
2. a loop over the tokens of a chunk carries the states of all chunks of a segment at once (the "walk");
3. backward repeats 1, walks forward keeping the states of the segment, and walks back from a zero adjoint; the adjoint
   that reaches a chunk from behind is passed on like the states and acts through matrix products.

Memory beyond inputs and outputs: the working set of one segment and, for backward, the states before each segment.

The two states are stacked, index 0 for M (driven by v and k) and 1 for Ibar (driven by beta and k ** 2).
README.md derives the adjoints and says why nothing is divided by alpha.

Shapes: n chunks in all, m of a segment, L tokens of a chunk, lanes N = m * H, and G, H, K, V as everywhere.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from palimpsa_kernels.packing import Chunks
from palimpsa_kernels.precision import without_autocast
from palimpsa_kernels.walk import Lanes, WalkGradients, walk, walk_back

CHUNK_SIZE = 32
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
            values=torch.stack([v.transpose(1, 2), beta.transpose(1, 2)]),
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

    def lanes(self) -> Lanes:
        """The same for a walk."""
        return Lanes(
            values=self.values.permute(3, 0, 4, 1, 2).flatten(3)[:, :, None].contiguous().unbind(),
            keys=self.keys.permute(3, 0, 4, 1, 2).flatten(3)[:, :, :, None].contiguous().unbind(),
            queries=self.queries.permute(2, 3, 0, 1).flatten(2)[:, :, None].contiguous().unbind(),
            alpha=self.log_alpha.permute(2, 0, 1).flatten(1).exp().contiguous().unbind(),
            prior=self.prior.repeat(len(self)),
        )


def _to_lanes(states: Tensor) -> Tensor:
    """[m, 2, H, V, K] to [2, K, V, N]."""
    return states.permute(1, 4, 3, 0, 2).flatten(3).contiguous()


def _from_lanes(states: Tensor, chunks: int) -> Tensor:
    """[2, K, V, N] to [m, 2, H, V, K]."""
    return states.unflatten(-1, (chunks, -1)).permute(3, 0, 4, 2, 1).contiguous()


def _input_gradients(
    segment: _Segment, walked: WalkGradients, before: Tensor, behind: Tensor, groups: int
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
    dkeys = (segment.values * to_end) @ adjoint + walked.keys.unflatten(-1, (m, -1)).permute(1, 3, 4, 0, 2)
    dvalues = dvalues_behind + walked.values.unflatten(-1, (m, -1)).permute(1, 3, 4, 0, 2)
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
    @without_autocast
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
        state = initial.new_zeros(initial.shape[1:])
        carried = []
        for part in _segments(chunks, initial.shape[2:].numel()):
            carried.append(state)
            segment = _Segment.of(part, inputs, prior)
            whole, to_end = segment.decays()
            before, state = chunks.pass_states(segment.added_states(to_end), whole, initial, final, part, state)
            y_LVN = walk(segment.lanes(), _to_lanes(before))
            y[part.start : part.stop] = y_LVN.unflatten(-1, (len(part), -1)).permute(2, 0, 3, 1)
        ctx.save_for_backward(q, k, v, beta, log_alpha, prior, initial, *carried)
        ctx.scale, ctx.chunks = scale, chunks
        return chunks.merge(y.mul_(scale), v.dtype), final

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy, dfinal = grads
        q, k, v, beta, log_alpha, prior, initial, *carried = ctx.saved_tensors
        chunks: Chunks = ctx.chunks
        inputs = [chunks.split(x) for x in (q, k, v, beta, log_alpha)]
        dy = chunks.split(dy) * ctx.scale
        dinputs = [torch.empty_like(x) for x in inputs]
        dprior = torch.zeros_like(prior)
        dinitial = dfinal.clone()
        adjoint = dfinal.new_zeros(dfinal.shape[1:])
        parts = _segments(chunks, initial.shape[2:].numel())
        most_lanes = max(map(len, parts), default=0) * v.shape[2]
        history = dy.new_empty(chunks.size + 1, 2, k.shape[3], v.shape[3], most_lanes)
        for part, state in reversed(list(zip(parts, carried, strict=True))):
            segment = _Segment.of(part, inputs, prior)
            whole, to_end = segment.decays()
            before, _ = chunks.pass_states(segment.added_states(to_end), whole, initial, None, part, state)
            dy_LVN = dy[part.start : part.stop].permute(1, 3, 0, 2).flatten(2).contiguous()
            lanes = len(part) * v.shape[2]
            walked = walk_back(segment.lanes(), _to_lanes(before), dy_LVN, history[..., :lanes])
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
