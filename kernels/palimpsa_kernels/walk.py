"""The walk: readouts of all tokens of many chunks, side by side, and its adjoint.

Lanes N = m * H (chunks times heads) come last, so that every operation runs over long contiguous rows. The two states
are stacked, index 0 for M (driven by v and k) and 1 for Ibar (driven by beta and k ** 2).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Lanes:
    """The inputs of a walk, an entry for each token of a chunk.

    Attributes:
        values: v and beta, each [2, 1, V, N].
        keys: k and k ** 2, each [2, K, 1, N].
        queries: each [K, 1, N].
        alpha: each [N].
        prior: [N].
    """

    values: Sequence[Tensor]
    keys: Sequence[Tensor]
    queries: Sequence[Tensor]
    alpha: Sequence[Tensor]
    prior: Tensor

    def __len__(self) -> int:
        return len(self.alpha)

    def advance(self, t: int, states: Tensor, out: Tensor) -> None:
        """Write the states [2, K, V, N] behind token t to `out`, from those before it."""
        torch.mul(states, self.alpha[t], out=out).addcmul_(self.values[t], self.keys[t])


def walk(lanes: Lanes, before: Tensor) -> Tensor:
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
class WalkGradients:
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


def walk_back(lanes: Lanes, before: Tensor, dy: Tensor, history: Tensor) -> WalkGradients:
    """Adjoint of `walk` for dy [L, V, N], with a zero adjoint behind the chunks.

    `history` [L + 1, 2, K, V, N] is scratch: fresh memory of that size costs more than a whole pass over it.
    """
    length = len(lanes)
    _, key_dim, value_dim, width = before.shape
    states = history.unbind()
    states[0].copy_(before)
    for t in range(length):
        lanes.advance(t, states[t], out=states[t + 1])

    grads = WalkGradients(
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
