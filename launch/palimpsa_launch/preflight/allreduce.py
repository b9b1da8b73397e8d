"""How fast ranks add up numbers together: NCCL with a GPU a rank, gloo without.

`python -m palimpsa_launch.preflight.allreduce` is one rank: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
are a launcher's, PREFLIGHT_* say what is added up. Rank 0 prints the bus bandwidth in GB/s.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

_WARM_UPS, _REPEATS = 2, 5


@dataclass(frozen=True)
class Team:
    """The ranks of a test, and where they meet."""

    name: str
    """No two tests share one."""
    head: str
    port: int
    """Of the store on the head node."""
    first_rank: int
    world_size: int


def measure(team: Team, ranks: int, megabytes: float, seconds: float) -> tuple[float, str]:
    """This node's ranks of a team; -> bus bandwidth in GB/s as rank 0 saw it, 0 on other nodes, and what went wrong."""
    environment = {
        "WORLD_SIZE": str(team.world_size),
        "MASTER_ADDR": team.head,
        "MASTER_PORT": str(team.port),
        "PREFLIGHT_TEST": team.name,
        "PREFLIGHT_MEGABYTES": str(megabytes),
        "PREFLIGHT_SECONDS": str(seconds),
    }
    workers = [_start(environment, team.first_rank + number, number) for number in range(ranks)]
    deadline = time.monotonic() + 1.5 * seconds
    speed, problem = 0.0, ""
    for number, worker in enumerate(workers):
        try:
            out, errors = worker.communicate(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            out, errors = worker.communicate()
            problem = problem or f"rank {number} of the node has not ended the all-reduce within {1.5 * seconds:.0f} s"
            continue
        if worker.returncode:
            last = errors.strip().splitlines()[-1:] or ["no message"]
            problem = problem or f"rank {number} of the node: exit code {worker.returncode}: {last[0]}"
        elif out.strip():
            speed = float(out)
    return speed, problem


def _start(environment: Mapping[str, str], rank: int, local_rank: int) -> subprocess.Popen[str]:
    own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
        env={**os.environ, **environment, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def main() -> None:
    import torch
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=float(os.environ["PREFLIGHT_SECONDS"]))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    backend = "nccl" if device.type == "cuda" else "gloo"
    named = dist.PrefixStore(os.environ["PREFLIGHT_TEST"], store)
    dist.init_process_group(backend, store=named, rank=rank, world_size=world_size, timeout=timeout)
    numbers = torch.empty(int(float(os.environ["PREFLIGHT_MEGABYTES"]) * 1e6 / 4), device=device)
    best = float("inf")
    for repeat in range(_WARM_UPS + _REPEATS):
        numbers.fill_(rank + 1)
        dist.barrier()
        start = time.monotonic()
        dist.all_reduce(numbers)
        if device.type == "cuda":
            torch.cuda.synchronize()
        if repeat >= _WARM_UPS:
            best = min(best, time.monotonic() - start)
        expected = world_size * (world_size + 1) / 2
        if not bool((numbers == expected).all()):
            raise RuntimeError(f"wrong sum: {numbers.min():g} to {numbers.max():g} instead of {expected:g}")
    dist.barrier()
    if rank == 0:
        print(2 * (world_size - 1) / world_size * numbers.nbytes / best / 1e9)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
