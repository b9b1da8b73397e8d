"""The all-reduce test itself, over gloo in processes of its own."""

from datetime import timedelta

import torch.distributed as dist
from palimpsa_launch.preflight.allreduce import Team, measure


def run(ranks: int, world_size: int, seconds: float) -> tuple[float, str]:
    store = dist.TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
    return measure(Team("0-0", "localhost", store.port, 0, world_size), ranks, 0.1, seconds)


def test_two_ranks_add_up():
    speed, problem = run(2, 2, 60)
    assert problem == ""
    assert speed > 1e-4


def test_rank_that_does_not_come_is_a_problem():
    speed, problem = run(1, 2, 3)
    assert speed == 0
    assert problem.startswith("rank 0 of the node")
