"""What a layer's part of a row gets from the parts before it, where the tokens of a row are spread over ranks.

Each context-parallel rank holds successive tokens of a packed row (`training.batch.RowPart`). Every rank's scan forms
what its own tokens add to the states and their decay, one all-gather shares that, and each rank combines the parts
before it into the states its first document starts from: nothing waits for a rank before it, forward or backward, and
nothing is computed twice (`palimpsa_kernels.Carry`). The convolution gets the last d_conv - 1 inputs of the rank
before, attention the keys and values of the whole row.

Collectives are left out where no document of a row lies on several ranks. Otherwise all ranks run the same ones in the
same order, backward too: `keep_in_graph` ties in those whose result a rank does not need.

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
from palimpsa_kernels import Carry, HeadParameters, Importance, mixing_scan
from torch import Tensor

from megatron_palimpsa.training.batch import RowPart


@dataclass
class PackedRow(PackedSeqParams):
    """Megatron's description of a row's documents, and which part of the row it is about."""

    part: RowPart | None = None
    offsets: tuple[int, ...] | None = None
    """`cu_seqlens_q` on the host; None until somebody needs them there."""

    def on_host(self) -> tuple[int, ...]:
        """`cu_seqlens_q` as numbers: once for all layers, for reading them from a GPU waits for it."""
        if self.offsets is None:
            self.offsets = tuple(self.cu_seqlens_q.tolist())
        return self.offsets


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


class Exchange(Carry):
    """One layer's exchange in one forward pass, first `windows`, then `scan`, and in its backward pass."""

    def __init__(self, part: RowPart, group: dist.ProcessGroup) -> None:
        self.goes_on = part.goes_on
        self.goes_off = part.open_from is not None
        self.is_inside = part.is_inside
        self._part = part
        self._group = group
        self._tails = torch.empty(0)
        self._decays = torch.empty(0)

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
        **options: Any,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`mixing_scan` of a part, its first document going on from the parts before; `options` are passed on.

        Returns:
            y, and the final states of the documents that end in the part (or () if they are not asked for).
        """
        if not self.goes_on:
            # The gradients of `windows` are exchanged behind those of the scan on every rank.
            x = keep_in_graph(x, self._tails)
        y, final = mixing_scan(
            q, k, x, dt, heads, importance, output_final_state=output_final_state, carry=self, **options
        )
        if self.goes_off:
            final = tuple(state[:-1] for state in final)
        return y, final

    def from_before(self, end: Tensor, decay: Tensor) -> Tensor:
        mine = torch.cat([end.flatten() * self.goes_off, decay * self.is_inside])
        gathered = self._gather(mine)
        heads = len(decay)
        ends, self._decays = gathered[:, :-heads].unflatten(1, end.shape), gathered[:, -heads:]
        state = torch.zeros_like(end)
        if self.goes_on:
            for rank in range(self._group.rank()):
                state = self._through(rank, state) + ends[rank]
        return state

    def from_behind(self, start: Tensor) -> Tensor:
        starts = self._gather(start.flatten() * self.goes_on).unflatten(1, start.shape)
        adjoint = torch.zeros_like(start)
        if self.goes_off:
            for rank in range(self._group.size() - 1, self._group.rank(), -1):
                adjoint = self._through(rank, adjoint) + starts[rank]
        return adjoint

    def _through(self, rank: int, state: Tensor) -> Tensor:
        """A state or its adjoint [S, H, ...] behind the tokens of a rank, as far as it comes through them."""
        return self._decays[rank].view(1, -1, *[1] * (state.dim() - 2)) * state

    def _gather(self, mine: Tensor) -> Tensor:
        gathered = mine.new_empty(self._group.size(), len(mine))
        dist.all_gather_into_tensor(gathered, mine[None], group=self._group)
        return gathered
