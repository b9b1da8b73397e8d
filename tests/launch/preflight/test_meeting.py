"""Nodes, as threads, meet at the store; what their all-reduces give is said by a stand-in."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.preflight import facts
from palimpsa_launch.preflight import meeting
from palimpsa_launch.preflight.meeting import Job, meet, neighbours
from palimpsa_launch.preflight.settings import Preflight


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def hold(monkeypatch, count, measure, absent=(), own=lambda number: {}, **bounds):
    """-> what each node learnt, the head node's report, the tests as (name, first rank, world size)."""
    tests = []

    def noted(test, ranks, megabytes, seconds):
        tests.append((test.name, test.first_rank, test.world_size))
        return measure(test)

    monkeypatch.setattr(meeting, "measure", noted)
    bounds = Preflight(**{"seconds": 10.0, **bounds})
    # `localhost` is where the store is; the others are names only.
    nodes = ["localhost", *(f"node{number}" for number in range(2, count + 1))]
    job = Job(nodes, free_port(), ranks=2, gpus=0, bounds=bounds)
    with ThreadPoolExecutor(count) as pool:
        present = [number for number in range(count) if number not in absent]
        parts = [pool.submit(meet, job, number, lambda number=number: facts(**own(number))) for number in present]
        answers = [part.result(timeout=240) for part in parts]
    return [good for good, _ in answers], answers[0][1], sorted(tests)


def test_all_well(monkeypatch):
    good, report, tests = hold(monkeypatch, 3, lambda test: (12.5 if test.first_rank == 0 else 0.0, ""))
    assert good == [True] * 3
    assert report.allreduce == [{"nodes": ["localhost", "node2", "node3"], "gb_s": 12.5, "problem": ""}]
    assert set(report.facts) == set(report.clocks) == {"localhost", "node2", "node3"}
    assert all(abs(ahead) < 5 for ahead in report.clocks.values())
    assert tests == [("0-0", 0, 6), ("0-0", 2, 6), ("0-0", 4, 6)]


def test_clock_of_a_node_that_is_ahead(monkeypatch):
    """Each node is a thread: the second one's clock is a minute ahead."""
    ahead = threading.local()

    def own(number):
        ahead.seconds = 60 if number == 1 else 0
        return {}

    monkeypatch.setattr(meeting, "_now", lambda: time.time() + getattr(ahead, "seconds", 0))
    good, report, _ = hold(monkeypatch, 3, lambda team: (1.0, ""), own=own)
    assert good == [False] * 3
    assert list(report.verdict.bad) == ["node2"]
    assert report.clocks["node2"] == pytest.approx(60, abs=5)


def test_bad_facts_stop_before_anything_is_measured(monkeypatch):
    good, report, tests = hold(monkeypatch, 3, None, own=lambda number: {"code": "x" * 64} if number == 2 else {})
    assert good == [False] * 3
    assert list(report.verdict.bad) == ["node3"]
    assert tests == []


def test_absent_node_is_named(monkeypatch):
    good, report, _ = hold(monkeypatch, 3, None, absent=[1], seconds=1.0)
    assert good == [False] * 2
    assert list(report.verdict.bad) == ["node2"]


def test_slow_link_is_found_by_smaller_tests(monkeypatch):
    """All tests with the third of four nodes are slow: its own ranks alone are not."""

    def measure(test):
        turn, first = map(int, test.name.split("-"))
        members = {1: [first], 2: [first, first + 1], 3: [first, (first + 1) % 4]}.get(turn, [0, 1, 2, 3])
        return (1.0 if 2 in members and len(members) > 1 else 50.0), ""

    good, report, tests = hold(monkeypatch, 4, measure, allreduce_gb_s=10.0)
    assert good == [False] * 4
    assert list(report.verdict.bad) == ["node3"]
    assert "1 GB/s, 10 wanted" in report.verdict.bad["node3"][0]
    assert len(tests) == 4 + 4 + 4 + 4
    assert [len(test["nodes"]) for test in report.allreduce] == [4, 1, 1, 1, 1, 2, 2, 2, 2]


def test_node_whose_ranks_fail_is_found_alone(monkeypatch):
    def measure(test):
        failing = test.name == "0-0" or test.name == "1-1"
        return 0.0, "rank 1 of the node: exit code 1: CUDA error" if failing else ""

    good, report, _ = hold(monkeypatch, 2, measure)
    assert good == [False] * 2
    assert list(report.verdict.bad) == ["node2"]
    assert "CUDA error" in report.verdict.bad["node2"][0]


@pytest.mark.parametrize("count", range(1, 9))
def test_every_node_is_in_two_pairs_and_in_one_at_a_time(count):
    turns = neighbours(count)
    pairs = [tuple(sorted(pair)) for turn in turns for pair in turn]
    assert len(set(pairs)) == len(pairs)
    for turn in turns:
        members = [number for pair in turn for number in pair]
        assert len(set(members)) == len(members)
    times = [sum(number in pair for pair in pairs) for number in range(count)]
    assert times == ([2] * count if count > 2 else [1] * count if count == 2 else [0])
