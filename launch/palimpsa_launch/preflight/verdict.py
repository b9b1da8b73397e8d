"""What is wrong with which node."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from palimpsa_launch.preflight.settings import Preflight

_ALIKE = ("code", "data", "packages", "python")


@dataclass
class Verdict:
    """Empty where all is well."""

    bad: dict[str, list[str]] = field(default_factory=dict)
    """Node -> what is wrong with it and not with the others: to be left out."""
    errors: list[str] = field(default_factory=list)
    """What no other choice of nodes would mend."""

    @property
    def is_good(self) -> bool:
        return not self.bad and not self.errors


def judge(
    nodes: Sequence[str],
    facts: Mapping[str, Mapping[str, Any]],
    clocks: Mapping[str, float],
    gpus: int,
    bounds: Preflight,
) -> Verdict:
    """Judge what the nodes have said of themselves.

    Args:
        facts: of `facts.node_facts`; a node that has not answered is missing.
        clocks: seconds by which a node's clock is ahead of the head node's.
        gpus: that a node must have.
    """
    found: dict[str, list[str]] = {node: [] for node in nodes}
    for node in nodes:
        if node in facts:
            found[node] += [*facts[node]["own_problems"], *_missing(facts[node], gpus, bounds)]
        else:
            found[node].append(f"has not answered within {bounds.seconds:g} s")
    for node, problem in [*_differences(facts), *_clocks(clocks, bounds)]:
        found[node].append(problem)
    shared = {node: _of_shared_folders(own, bounds) for node, own in facts.items()}
    if len(nodes) == 1:
        # Nobody to compare with: folders that all nodes share are no node's fault.
        return Verdict({node: found[node] for node in nodes if found[node]}, shared.get(nodes[0], []))
    return _shared_out({node: found[node] + shared.get(node, []) for node in nodes})


def blame(nodes: Sequence[str], alone: Mapping[str, str], pairs: Mapping[tuple[str, str], str]) -> Verdict:
    """Which node to blame for an all-reduce over all of them that failed or was slow.

    Args:
        alone: node -> what went wrong with its own ranks alone; "" where nothing did.
        pairs: two nodes -> the same for both together.
    """
    found = {node: [f"all-reduce over its own ranks: {alone[node]}"] if alone.get(node) else [] for node in nodes}
    if not any(found.values()):
        for node in nodes:
            others = {pair: problem for pair, problem in pairs.items() if node in pair}
            # One bad pair says nothing of which of the two it is.
            if len(others) > 1 and all(others.values()):
                found[node] = [f"all-reduce of {' and '.join(pair)}: {problem}" for pair, problem in others.items()]
    verdict = _shared_out(found)
    if verdict.is_good:
        told = [f"{' and '.join(pair)}: {problem}" for pair, problem in pairs.items() if problem]
        verdict.errors.append(f"the all-reduce over all nodes failed or was slow, no single node is to blame: {told}")
    return verdict


def _shared_out(found: Mapping[str, list[str]]) -> Verdict:
    """A thing that is wrong with all of several nodes is not theirs."""
    bad = {node: problems for node, problems in found.items() if problems}
    if len(found) > 1 and len(bad) == len(found):
        return Verdict(errors=[f"{node}: {problem}" for node, problems in bad.items() for problem in problems])
    return Verdict(bad=bad)


def _of_shared_folders(facts: Mapping[str, Any], bounds: Preflight) -> list[str]:
    return [*facts["shared_problems"], *_full(facts, "run_folder_gb", "the run folder", bounds)]


def _full(facts: Mapping[str, Any], key: str, what: str, bounds: Preflight) -> list[str]:
    free, wanted = facts.get(key), getattr(bounds, key)
    if free is None or free >= wanted:
        return []
    return [f"{free:g} GB free under {what}, {wanted:g} wanted (preflight.{key})"]


def _missing(facts: Mapping[str, Any], gpus: int, bounds: Preflight) -> list[str]:
    problems = _full(facts, "local_folder_gb", facts["local_folder"], bounds)
    found = facts.get("gpus", [])
    if "gpus" in facts and len(found) < gpus:
        problems.append(f"{len(found)} GPUs, {gpus} wanted (gpus_per_node)")
    for number, gpu in enumerate(found):
        if gpu["free_gb"] < bounds.gpu_memory_free * gpu["total_gb"]:
            problems.append(
                f"GPU {number} has {gpu['free_gb']:g} of {gpu['total_gb']:g} GB free, "
                f"{bounds.gpu_memory_free:g} of it wanted (preflight.gpu_memory_free): another program is on it"
            )
    return problems


def _differences(facts: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Nodes that differ from most; from the head node, the first, where there is no most."""
    found = []
    for key in _ALIKE:
        values = {node: str(own[key]) for node, own in facts.items() if key in own}
        counts = Counter(values.values())
        for node, value in values.items():
            usual, _ = counts.most_common(1)[0]
            if value != usual:
                found.append((node, f"other {key} than the other nodes: {_short(value)} instead of {_short(usual)}"))
    return found


def _clocks(clocks: Mapping[str, float], bounds: Preflight) -> list[tuple[str, str]]:
    if not clocks:
        return []
    # Of two clocks the head node's counts.
    middle = statistics.median_low(clocks.values()) if len(clocks) > 2 else 0.0
    off = {node: clock - middle for node, clock in clocks.items()}
    return [
        (node, f"its clock is off by {clock:+.1f} s, {bounds.clock_seconds:g} allowed (preflight.clock_seconds)")
        for node, clock in off.items()
        if abs(clock) > bounds.clock_seconds
    ]


def _short(value: str) -> str:
    return value if len(value) < 200 and " " in value else value[:12]
