"""The nodes of a job meet at a store on the head node, which gathers what they say and decides what they do next."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from palimpsa_launch.preflight.allreduce import Team, measure
from palimpsa_launch.preflight.settings import Preflight
from palimpsa_launch.preflight.verdict import Verdict, blame, judge


@dataclass(frozen=True)
class Job:
    """What all nodes of a job know."""

    nodes: Sequence[str]
    """The head node first."""
    port: int
    """On the head node, for the store."""
    ranks: int
    """Of a node."""
    gpus: int
    """Of a node."""
    bounds: Preflight

    @property
    def megabytes(self) -> float:
        return self.bounds.allreduce_mb or (256.0 if self.gpus else 4.0)


@dataclass
class Report:
    """All that the head node was told."""

    facts: dict[str, Any] = field(default_factory=dict)
    clocks: dict[str, float] = field(default_factory=dict)
    """Seconds by which a node's clock is ahead of the head node's."""
    allreduce: list[dict[str, Any]] = field(default_factory=list)
    """Tests: the nodes, GB/s, what went wrong."""
    verdict: Verdict = field(default_factory=Verdict)


def meet(job: Job, number: int, ask_self: Callable[[], dict[str, Any]]) -> tuple[bool, Report | None]:
    """Take part as node `number`; -> whether all is well, and on the head node, number 0, the report.

    Raises:
        torch.distributed.DistError: the head node cannot be reached, or no longer.
    """
    if number:
        return _attend(_store(job, is_head=False), job, number, ask_self), None
    held = _store(job, is_head=True)
    with ThreadPoolExecutor(1) as pool:
        report = pool.submit(_lead, held, job)
        is_good = _attend(_store(job, is_head=False), job, number, ask_self)
        return is_good, report.result()


def _store(job: Job, *, is_head: bool) -> dist.TCPStore:
    patience = timedelta(seconds=job.bounds.seconds)
    store = dist.TCPStore(job.nodes[0], job.port, is_master=is_head, timeout=patience, wait_for_workers=False)
    # Between two words of the head node's lie a silent node, a test that hangs, and both.
    store.set_timeout(4 * patience)
    return store


def _attend(store: dist.TCPStore, job: Job, number: int, ask_self: Callable[[], dict[str, Any]]) -> bool:
    _say(store, f"facts/{number}", ask_self())
    head_time = json.loads(store.get("time"))
    _say(store, f"clock/{number}", _now() - head_time)
    for turn in itertools.count():
        groups = json.loads(store.get(f"turn/{turn}"))
        if isinstance(groups, bool):  # the end
            _say(store, f"bye/{number}", True)
            return groups
        for group in groups:
            if number in group:
                team = Team(
                    name=f"{turn}-{group[0]}",
                    head=job.nodes[0],
                    port=job.port,
                    first_rank=group.index(number) * job.ranks,
                    world_size=len(group) * job.ranks,
                )
                _say(store, f"result/{turn}/{number}", measure(team, job.ranks, job.megabytes, job.bounds.seconds))
    raise AssertionError("the turns have an end")


def _now() -> float:
    return time.time()


def _lead(store: dist.TCPStore, job: Job) -> Report:
    report = Report()
    everyone = list(range(len(job.nodes)))
    facts = _gather(store, "facts", everyone, job.bounds.seconds)
    # Whoever waits for it reads its own clock at the moment it comes.
    _say(store, "time", _now())
    clocks = _gather(store, "clock", list(facts), job.bounds.seconds)
    report.facts = {job.nodes[number]: own for number, own in facts.items()}
    report.clocks = {job.nodes[number]: clock for number, clock in clocks.items()}
    report.verdict = judge(job.nodes, report.facts, report.clocks, job.gpus, job.bounds)
    turns = _Turns(store, job, report)
    if report.verdict.is_good and turns.problems([everyone])[tuple(everyone)]:
        report.verdict = _blame(turns, job)
    turns.end(report.verdict.is_good)
    _gather(store, "bye", list(facts), 10.0)
    return report


def _blame(turns: _Turns, job: Job) -> Verdict:
    """Who it was, by smaller tests."""
    names, count = job.nodes, len(job.nodes)
    alone = turns.problems([[number] for number in range(count)])
    pairs: dict[tuple[str, str], str] = {}
    if not any(alone.values()):
        for groups in neighbours(count):
            pairs |= {(names[a], names[b]): problem for (a, b), problem in turns.problems(groups).items()}
    return blame(names, {names[number]: problem for (number,), problem in alone.items()}, pairs)


def neighbours(count: int) -> list[list[list[int]]]:
    """Pairs of neighbours on a ring of `count` nodes, in turns in which no node is in two pairs."""
    pairs = [[number, (number + 1) % count] for number in range(count if count > 2 else count - 1)]
    last = [pairs.pop()] if count % 2 and count > 2 else []
    return [turn for turn in (pairs[::2], pairs[1::2], last) if turn]


class _Turns:
    """Tests that the head node has the others do, one turn after the other."""

    def __init__(self, store: dist.TCPStore, job: Job, report: Report) -> None:
        self._store = store
        self._job = job
        self._report = report
        self._turn = 0

    def problems(self, groups: Sequence[list[int]]) -> dict[tuple[int, ...], str]:
        """All-reduces over groups of nodes, all at once; -> what went wrong in each, "" where nothing did."""
        _say(self._store, f"turn/{self._turn}", groups)
        members = [number for group in groups for number in group]
        results = _gather(self._store, f"result/{self._turn}", members, 2 * self._job.bounds.seconds)
        self._turn += 1
        return {tuple(group): self._judge(group, results) for group in groups}

    def _judge(self, group: list[int], results: Mapping[int, Any]) -> str:
        job, names = self._job, [self._job.nodes[number] for number in group]
        speed = max((results[number][0] for number in group if number in results), default=0.0)
        said = [(number, results[number][1] if number in results else "no answer") for number in group]
        problem = "; ".join(f"{job.nodes[number]}: {text}" for number, text in said if text)
        if not problem and len(group) * job.ranks > 1 and speed < job.bounds.allreduce_gb_s:
            problem = f"{speed:.3g} GB/s, {job.bounds.allreduce_gb_s:g} wanted (preflight.allreduce_gb_s)"
        self._report.allreduce.append({"nodes": names, "gb_s": speed, "problem": problem})
        return problem

    def end(self, is_good: bool) -> None:
        _say(self._store, f"turn/{self._turn}", is_good)


def _say(store: dist.TCPStore, key: str, value: Any) -> None:
    store.set(key, json.dumps(value))


def _gather(store: dist.TCPStore, key: str, numbers: Sequence[int], seconds: float) -> dict[int, Any]:
    """What the nodes have said within so many seconds."""
    deadline = time.monotonic() + seconds
    found = {}
    for number in numbers:
        left = max(deadline - time.monotonic(), 0.01)
        try:
            store.wait([f"{key}/{number}"], timedelta(seconds=left))
        except dist.DistStoreError:
            continue
        found[number] = json.loads(store.get(f"{key}/{number}"))
    return found
