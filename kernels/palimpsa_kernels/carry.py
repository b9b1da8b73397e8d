"""Rows whose tokens are spread over ranks: what a scan of a part gets from the parts before, and backward from behind.

Both states of a scan are affine in what they start from, state_end = decay * state_start + what the tokens add. A scan
of a part forms what its tokens add anyway, so that one exchange between forming and using the states is all that
passes between the parts forward, and one of their adjoints backward.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor


class Carry(ABC):
    """One scan of one part of a row. Its methods are collective: once each, on every rank, the forward one first."""

    goes_on: bool
    """The part's first document began in an earlier part."""
    goes_off: bool
    """The part's last document goes on in a later part."""
    is_inside: bool
    """All of the part's tokens belong to one document, which began before them and goes on behind them."""

    @abstractmethod
    def from_before(self, end: Tensor, decay: Tensor) -> Tensor:
        """The states in front of the part, [S, H, ...] fp32; zeros unless `goes_on`.

        Args:
            end: what the part's tokens alone leave of its last document [S, H, ...] fp32; looked at if `goes_off`.
            decay: over all of the part's tokens [H] fp32; looked at if `is_inside`.
        """

    @abstractmethod
    def from_behind(self, start: Tensor) -> Tensor:
        """The adjoint of the states behind the part, [S, H, ...] fp32; zeros unless `goes_off`.

        Args:
            start: adjoint of the states in front of the part, of its own outputs [S, H, ...] fp32; looked at if
                `goes_on`.
        """


class HandOver(torch.autograd.Function):
    """`Carry.from_before` for autograd."""

    @staticmethod
    def forward(ctx: Any, carry: Carry, end: Tensor, decay: Tensor) -> Tensor:
        ctx.carry = carry
        start = carry.from_before(end, decay)
        ctx.save_for_backward(start)
        return start

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        [start] = ctx.saved_tensors
        behind = ctx.carry.from_behind(grads[0])
        decay = (behind * start).flatten(2).sum((0, 2)) if ctx.carry.is_inside else None
        return None, behind, decay
