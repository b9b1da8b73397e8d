"""Scans of a row's parts in one process: a thread for each part, one of them at work at a time."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from palimpsa_kernels import Carry

from megatron_palimpsa.training.batch import Batch


class Table:
    """Where the parts lay down what they give one another."""

    def __init__(self, parts):
        self.turn = threading.Lock()
        self._barrier = threading.Barrier(parts)
        self._rounds = {}

    def all_of(self, number, rank, value):
        """What every part gave in this round, in their order."""
        given = self._rounds.setdefault(number, {})
        given[rank] = value
        self.turn.release()
        try:
            self._barrier.wait(120)
        finally:
            self.turn.acquire()
        return [given[other] for other in range(self._barrier.parties)]


class PartCarry(Carry):
    """The combination of states written out from its definition, part after part."""

    def __init__(self, part, rank, table):
        self.goes_on, self.goes_off, self.is_inside = part.goes_on, part.open_from is not None, part.is_inside
        self._rank, self._table = rank, table

    def from_before(self, end, decay):
        given = self._table.all_of("forward", self._rank, (self.goes_off, self.is_inside, end, decay))
        self._given = given
        state = torch.zeros_like(end)
        for goes_off, is_inside, added, decay in given[: self._rank]:
            state = (self._broadcast(decay, state) * state if is_inside else 0) + (added if goes_off else 0)
        return state if self.goes_on else torch.zeros_like(end)

    def from_behind(self, start):
        starts = self._table.all_of("backward", self._rank, (self.goes_on, start))
        adjoint = torch.zeros_like(start)
        for (goes_on, own), (_, is_inside, _, decay) in reversed(
            list(zip(starts, self._given, strict=True))[self._rank + 1 :]
        ):
            adjoint = (own if goes_on else 0) + (self._broadcast(decay, adjoint) * adjoint if is_inside else 0)
        return adjoint if self.goes_off else torch.zeros_like(start)

    @staticmethod
    def _broadcast(decay, state):
        return decay.view(1, -1, *[1] * (state.dim() - 2))


def run_parts(row_offsets, tokens, parts, work):
    """`work(carry, batch, slice)` for each part of a row of `tokens` tokens, in threads; what they return, in order."""
    table = Table(parts)
    empty = torch.empty(1, tokens)
    row = Batch(empty, empty, empty, torch.tensor(row_offsets, dtype=torch.int32))
    length = tokens // parts

    def one(rank):
        with table.turn:
            batch = row.of_rank(rank, parts)
            return work(PartCarry(batch.part, rank, table), batch, slice(rank * length, (rank + 1) * length))

    with ThreadPoolExecutor(parts) as pool:
        return list(pool.map(one, range(parts)))
