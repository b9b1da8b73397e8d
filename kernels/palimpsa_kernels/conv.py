"""Depthwise causal convolution in PyTorch.

Every document is copied behind its own W - 1 earlier inputs, so that one shifted sum per tap serves all documents and
no tap can reach into the document before; the final state is what then lies before a document's end.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from palimpsa_kernels.packing import document_offsets, spread_positions


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
    """See `palimpsa_kernels.causal_conv1d`."""
    batch, tokens, dim = x.shape
    history = weight.shape[1] - 1
    offsets = document_offsets(batch, tokens, cu_seqlens)
    documents, used = len(offsets) - 1, offsets[-1]
    starts = [offset + (d + 1) * history for d, offset in enumerate(offsets[:-1])]
    positions = spread_positions(offsets, starts, x.device)
    slots = _slots_before(starts, history, x.device)

    flat = x.reshape(batch * tokens, dim)[:used].float()
    spread = flat.new_zeros(used + documents * history, dim).index_copy(0, positions, flat)
    if initial_state is not None:
        spread = spread.index_copy(0, slots, initial_state.mT.reshape(-1, dim).float())

    taps = weight.float().unbind(1)
    y = spread[history:] * taps[history]
    for w in range(history):
        y = torch.addcmul(y, spread[w : w + len(y)], taps[w])
    y = y.index_select(0, positions - history)
    if bias is not None:
        y = y + bias.float()
    if activation == "silu":
        y = F.silu(y)
    y = F.pad(y, (0, 0, 0, batch * tokens - used)).view(batch, tokens, dim).to(x.dtype)
    if not output_final_state:
        return y
    ends = [start + after - before for start, (before, after) in zip(starts, pairwise(offsets), strict=True)]
    final = spread.index_select(0, _slots_before(ends, history, x.device))
    return y, final.view(documents, history, dim).mT.to(x.dtype)


def _slots_before(places: list[int], count: int, device: torch.device) -> Tensor:
    """The `count` indices before each place, flat [len(places) * count] int64."""
    return (torch.tensor(places, dtype=torch.int64)[:, None] + torch.arange(-count, 0)).flatten().to(device)


def causal_conv1d_step(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str | None = "silu"
) -> Tensor:
    """See `palimpsa_kernels.causal_conv1d_step`."""
    window = torch.cat([state.float(), x.float()[..., None]], -1)
    state.copy_(window[..., 1:])
    y = (window * weight.float()).sum(-1)
    if bias is not None:
        y = y + bias.float()
    return (F.silu(y) if activation == "silu" else y).to(x.dtype)
