"""RMSNorm with a gate in front, within groups of channels, in PyTorch; the public function with its documentation."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from palimpsa_kernels import checks
from palimpsa_kernels.dispatch import own_triton

Total = Callable[[Tensor], Tensor]


def gated_rms_norm(
    x: Tensor,
    z: Tensor | None,
    weight: Tensor,
    *,
    eps: float,
    group_size: int,
    segments: Sequence[int] | None = None,
    total: Total | None = None,
) -> Tensor:
    """RMSNorm of x * silu(z) within groups of consecutive channels, differentiable in x, z and weight.

        g = x * silu(z)        y = g / sqrt(sum of g^2 over the group / group_size + eps) * weight

    Everything is formed in fp32. On CUDA it takes one pass forward and one backward (two each where groups span
    ranks); x, z, weight and one number a group and row are kept.

    Args:
        x: [..., C]; bf16, fp16 or fp32.
        z: gate [..., C], of any of these dtypes; None for plain RMSNorm (g = x).
        weight: [C]; y has its dtype.
        eps: added to the mean square.
        group_size: channels of a whole group.
        segments: where this rank's channels are cut by groups that span ranks: sizes of the consecutive pieces, each
            of one group. None: C is a multiple of `group_size`.
        total: adds the sums of a segment's channels [..., len(segments)] fp32 up over the ranks that share its group;
            differentiable, called for the squares and, backward, for sums of the same shape. Goes with `segments`.

    Returns:
        y [..., C] in the weight's dtype.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, sizes that are not positive.
    """
    given = {"x": x, "weight": weight} | ({} if z is None else {"z": z})
    checks.check_tensors(given)
    checks.require(x.dim() > 0, "x has 0 dimensions, expected at least 1")
    for name, tensor in given.items():
        checks.check_dtypes({name: tensor}, {})
        checks.require(tensor.device == x.device, f"{name} is on {tensor.device}, but x is on {x.device}")
    checks.require(group_size > 0, f"group_size must be positive, not {group_size}")
    channels = x.shape[-1]
    shapes: dict[str, tuple[Tensor, tuple[int, ...]]] = {"weight": (weight, (channels,))}
    if z is not None:
        shapes["z"] = (z, tuple(x.shape))
    checks.check_shapes(shapes)
    checks.require((segments is None) == (total is None), "segments and total go together")
    if segments is None:
        checks.require(channels % group_size == 0, f"{channels} channels are no multiple of groups of {group_size}")
    else:
        checks.require(min(segments, default=0) >= 0, f"segments {list(segments)} are negative in places")
        checks.require(sum(segments) == channels, f"segments {list(segments)} do not sum to {channels} channels")
    function = own_triton("gated_rms_norm", x.device.type) or in_pytorch
    return function(x, z, weight, eps=eps, group_size=group_size, segments=segments, total=total)


def in_pytorch(
    x: Tensor,
    z: Tensor | None,
    weight: Tensor,
    *,
    eps: float,
    group_size: int,
    segments: Sequence[int] | None,
    total: Total | None,
) -> Tensor:
    """`gated_rms_norm` from PyTorch operations."""
    gated = x.float() if z is None else x.float() * F.silu(z.float())
    if segments is None or total is None:
        normed = F.rms_norm(gated.unflatten(-1, (-1, group_size)), (group_size,), eps=eps).flatten(-2)
    else:
        pieces = gated.split(list(segments), dim=-1)
        squares = total(torch.stack([piece.square().sum(-1) for piece in pieces], dim=-1))
        scales = torch.rsqrt(squares / group_size + eps).unsqueeze(-1).unbind(-2)
        normed = torch.cat([piece * scale for piece, scale in zip(pieces, scales, strict=True)], dim=-1)
    return (normed * weight.float()).to(weight.dtype)
