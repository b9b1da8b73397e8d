"""Which node is named, for what, and what no other choice of nodes would mend."""

import pytest
from helpers.preflight import facts
from palimpsa_launch.preflight.settings import Preflight
from palimpsa_launch.preflight.verdict import Verdict, blame, judge

NODES = ["node1", "node2", "node3"]
BOUNDS = Preflight()


def of_all(**nodes):
    return {node: nodes.get(node, facts()) for node in NODES}


def judged(found, clocks=None, nodes=NODES):
    return judge(nodes, found, dict.fromkeys(nodes, 0.0) if clocks is None else clocks, 4, BOUNDS)


def test_equal_nodes_are_good():
    assert judged(of_all()).is_good


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"gpus": facts()["gpus"][:3]}, "3 GPUs, 4 wanted"),
        (
            {"gpus": [*facts()["gpus"][:3], {"name": "H", "total_gb": 140.0, "free_gb": 100.0}]},
            "GPU 3 has 100 of 140 GB",
        ),
        ({"own_problems": ["GPUs: GPU 2 computes a wrong product"]}, "wrong product"),
        ({"local_folder_gb": 0.5}, "0.5 GB free under /tmp/x"),
        ({"run_folder_gb": 0.5}, "0.5 GB free under the run folder"),
        ({"shared_problems": ["data: set.json is missing"]}, "set.json is missing"),
        ({"code": "e" * 64}, "other code than the other nodes"),
        ({"data": "e" * 64}, "other data than the other nodes"),
        ({"packages": {"torch": "1"}}, "{'torch': '1'} instead of {'torch': '2'}"),
    ],
)
def test_a_bad_node_is_named_with_what_is_wrong(changes, told):
    verdict = judged(of_all(node2=facts(**changes)))
    assert list(verdict.bad) == ["node2"]
    assert told in verdict.bad["node2"][0]
    assert not verdict.errors
    if not {"code", "data", "packages"} & changes.keys():
        everywhere = judged({node: facts(**changes) for node in NODES})
        assert not everywhere.bad
        assert len(everywhere.errors) == 3


def test_silent_node_is_named():
    found = of_all()
    del found["node3"]
    verdict = judged(found, clocks={"node1": 0.0, "node2": 0.0})
    assert verdict.bad == {"node3": ["has not answered within 180 s"]}


def test_clock_is_compared_with_most_others_the_head_node_s_too():
    assert list(judged(of_all(), {"node1": 0.0, "node2": 9.0, "node3": 0.1}).bad) == ["node2"]
    assert list(judged(of_all(), {"node1": 0.0, "node2": 9.0, "node3": 9.1}).bad) == ["node1"]
    assert judged(of_all(), {"node1": 0.0, "node2": 4.9, "node3": -4.9}).is_good
    two = {node: facts() for node in NODES[:2]}
    assert list(judged(two, {"node1": 0.0, "node2": 9.0}, NODES[:2]).bad) == ["node2"]


def test_the_only_node_is_left_out_for_what_is_its_own_alone():
    alone = judged({"node1": facts(local_folder_gb=0.0)}, nodes=["node1"])
    assert list(alone.bad) == ["node1"]
    shared = judged({"node1": facts(run_folder_gb=0.0)}, nodes=["node1"])
    assert not shared.bad
    assert "run folder" in shared.errors[0]
    assert list(judged({}, {}, ["node1"]).bad) == ["node1"]


def test_blame_falls_on_the_node_that_fails_alone():
    verdict = blame(NODES, {"node1": "", "node2": "rank 1: exit code 1", "node3": ""}, {})
    assert list(verdict.bad) == ["node2"]


def test_blame_falls_on_the_node_of_two_bad_pairs():
    good = dict.fromkeys(NODES, "")
    pairs = {("node1", "node2"): "1 GB/s", ("node2", "node3"): "1 GB/s", ("node3", "node1"): ""}
    verdict = blame(NODES, good, pairs)
    assert list(verdict.bad) == ["node2"]
    assert len(verdict.bad["node2"]) == 2
    # One pair alone says nothing of which of the two it is, nor do good pairs.
    for told in ({("node1", "node2"): "1 GB/s"}, dict.fromkeys(pairs, "")):
        undecided = blame(NODES[:2], good, told)
        assert not undecided.bad
        assert not undecided.is_good


def test_empty_verdict_is_good():
    assert Verdict().is_good
