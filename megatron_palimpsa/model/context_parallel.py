"""What a layer's part of a row gets from the parts before it, where the tokens of a row are spread over ranks.

Each context-parallel rank holds successive tokens of a packed row (`training.batch.RowPart`). Both states of a scan
are affine in what they start from, state_end = decay * state_start + what the tokens add, so that every rank computes
what its own tokens add and their decay, one all-gather shares that, and each rank combines the parts before it into
the states its first document starts from: nothing waits for a rank before it, forward or backward. The convolution
gets the last d_conv - 1 inputs of the rank before, attention the keys and values of the whole row.

The collectives are differentiable: what an all-gather gave, a reduce-scatter takes the gradients of. They are left
out where no document of a row lies on several ranks. Otherwise all ranks run the same ones in the same order, backward
too: `keep_in_graph` ties in those whose result a rank does not need.

Shapes: T tokens of a part, H heads, G groups, K and V channels as everywhere; parts hold one row, B = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from palimpsa_kernels import HeadParameters, Importance, mixing_scan
from torch import Tensor

from megatron_palimpsa.model.end_states import end_states
from megatron_palimpsa.training.batch import RowPart


@dataclass
class PackedRow(PackedSeqParams):
    """Megatron's description of a row's documents, and which part of the row it is about."""

    part: RowPart | None = None


def crossed_part(packed: PackedSeqParams | None, group: dist.ProcessGroup) -> RowPart | None:
    """The part that a layer works on; None where no document has tokens on several context-parallel ranks.

    Raises:
        ValueError: there is context parallelism, but the input is not a part of a packed row.
    """
    if group.size() == 1:
        return None
    part = packed.part if isinstance(packed, PackedRow) else None
    if part is None:
        raise ValueError(
            f"context parallelism over {group.size()} ranks takes parts of packed rows (Batch.of_rank), not whole rows"
        )
    return part if part.crossed else None


def gather_parts(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[...] of each rank -> [ranks, ...] on all of them; gradients are summed over ranks."""
    return gather_from_sequence_parallel_region(tensor.unsqueeze(0), tensor_parallel_output_grad=True, group=group)


class _KeepInGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, other: Tensor) -> Tensor:
        ctx.other = other.shape, other.dtype
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype = ctx.other
        return grads[0], grads[0].new_zeros(shape, dtype=dtype)


def keep_in_graph(tensor: Tensor, other: Tensor) -> Tensor:
    """`tensor`, through which `other` gets a gradient of zeros: what made `other` then takes part in backward."""
    return _KeepInGraph.apply(tensor, other)


class Exchange:
    """One layer's exchange in one forward pass: first `windows`, then `scan`."""

    def __init__(self, part: RowPart, group: dist.ProcessGroup) -> None:
        self._part = part
        self._group = group
        self._tails = torch.empty(0)

    def windows(self, x: Tensor, bc: Tensor, width: int, documents: int) -> tuple[Tensor | None, Tensor | None]:
        """Initial states of the convolutions of x and bc.

        Args:
            x, bc: inputs of the convolutions [1, T, D], T >= width.
            width: inputs that a convolution looks back.
            documents: N of the part.

        Returns:
            For each [N, D, width]: the inputs before the part that belong to its first document, zeros elsewhere; None
            if that document begins in the part.
        """
        tails = torch.cat([x[0, -width:], bc[0, -width:]], dim=-1)
        self._tails = gather_parts(tails, self._group)
        part = self._part
        if not part.goes_on:
            return None, None
        known = min(width, part.start - part.first_start)
        before = F.pad(self._tails[self._group.rank() - 1, width - known :], (0, 0, width - known, 0)).mT
        window_x, window_bc = before.unsqueeze(0).split([x.shape[-1], bc.shape[-1]], dim=1)
        others = (0, 0, 0, 0, 0, documents - 1)
        return F.pad(window_x, others), F.pad(window_bc, others)

    def scan(
        self,
        q: Tensor,
        k: Tensor,
        x: Tensor,
        dt: Tensor,
        heads: HeadParameters,
        importance: Importance | None,
        *,
        output_final_state: bool,
        cu_seqlens: Tensor,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`mixing_scan` of a part, its first document going on from the parts before.

        Returns:
            y, and the final states of the documents that end in the part (or () if they are not asked for).
        """
        part = self._part
        gathered = self._gather_end_states(k, x, dt, heads, importance)
        if not part.goes_on:
            y, final = mixing_scan(
                q, k, x, dt, heads, importance, output_final_state=output_final_state, cu_seqlens=cu_seqlens
            )
            y = keep_in_graph(y, gathered)
        else:
            states = self._combine(gathered, x.shape[2:], k.shape[-1])
            y, final = _scan_from(
                states, part.first_end, q, k, x, dt, heads, importance, output_final_state, cu_seqlens
            )
        if part.open_from is not None:
            final = tuple(state[:-1] for state in final)
        return y, final

    def _gather_end_states(
        self, k: Tensor, x: Tensor, dt: Tensor, heads: HeadParameters, importance: Importance | None
    ) -> Tensor:
        """Each rank's end states and total decay in one row: [ranks, kinds * H * V * K + H] fp32."""
        part = self._part
        kinds = 1 if importance is None else 2
        if part.open_from is None:
            size = kinds * x.shape[2] * x.shape[3] * k.shape[-1] + x.shape[2]
            # Needs a gradient where the other ranks' need one: the all-gather has a collective backward too.
            mine = keep_in_graph(dt.new_zeros(size, dtype=torch.float32), heads.dt_bias)
        else:
            k, x, dt = (t[0, part.open_from :] for t in (k, x, dt))
            if importance is not None:
                importance = importance._replace(logits=importance.logits[0, part.open_from :])
            states, decay = end_states(k, x, dt, heads, importance)
            if not part.is_inside:
                decay = torch.zeros_like(decay)
            mine = torch.cat([state.flatten() for state in (*states, decay)])
        # Backward, this all-gather's collective comes before that of the tails on every rank.
        return gather_parts(keep_in_graph(mine, self._tails), self._group)

    def _combine(self, gathered: Tensor, shape: torch.Size, key_dim: int) -> tuple[Tensor, ...]:
        """The states behind the parts before this one, each [1, H, V, K]."""
        heads = shape[0]
        before = gathered[: self._group.rank()]
        states = before[:, :-heads].unflatten(1, (-1, *shape, key_dim))
        decays = before[:, -heads:, None, None]
        state = states[0]
        for decay, added in zip(decays[1:], states[1:], strict=True):
            state = decay * state + added
        return tuple(kind.unsqueeze(0) for kind in state.unbind())


def _scan_from(
    states: tuple[Tensor, ...],
    first_end: int,
    q: Tensor,
    k: Tensor,
    x: Tensor,
    dt: Tensor,
    heads: HeadParameters,
    importance: Importance | None,
    output_final_state: bool,
    cu_seqlens: Tensor,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`mixing_scan` whose first document, of `first_end` tokens, starts from `states` [1, H, V, K].

    The other documents are a scan of their own: states for each of them, nearly all zero, would be kept for backward.
    """
    if len(cu_seqlens) == 2:
        return mixing_scan(
            q, k, x, dt, heads, importance,
            initial_state=states, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
        )  # fmt: skip
    halves = [t.split([first_end, t.shape[1] - first_end], dim=1) for t in (q, k, x, dt)]
    importances: tuple[Importance | None, Importance | None] = (None, None)
    if importance is not None:
        logits = importance.logits.split([first_end, x.shape[1] - first_end], dim=1)
        importances = importance._replace(logits=logits[0]), importance._replace(logits=logits[1])
    (q1, q2), (k1, k2), (x1, x2), (dt1, dt2) = halves
    first, final_first = mixing_scan(
        q1, k1, x1, dt1, heads, importances[0], initial_state=states, output_final_state=output_final_state
    )
    rest, final_rest = mixing_scan(
        q2, k2, x2, dt2, heads, importances[1],
        output_final_state=output_final_state, cu_seqlens=cu_seqlens[1:] - cu_seqlens[1],
    )  # fmt: skip
    final = tuple(torch.cat(pair) for pair in zip(final_first, final_rest, strict=True))
    return torch.cat([first, rest], dim=1), final
