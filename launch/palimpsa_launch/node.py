"""A node's part in a stage's job: srun starts `python -m palimpsa_launch.node OPTIONS -- train STAGE.yaml` on each.

It asks the node what the pre-flight check wants to know, then has torchrun start the ranks. SLURM sends SIGTERM to all
processes of a step that is cancelled or preempted: the ranks save and stop, this program makes the stop file for those
that do not listen yet, and torchrun, which would kill ranks that take their time, is deaf to it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_palimpsa.config import ConfigError, read_as
from palimpsa_launch import node_folder
from palimpsa_launch.preflight.facts import node_facts
from palimpsa_launch.preflight.settings import Preflight

_FAILED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: Path(os.environ["PALIMPSA_STOP_FILE"]).touch())
    number = node_number(options.nodes)
    parent = node_folder.place(options.local_folder, os.environ)
    if options.preflight != "null" and not _is_ready(options, number, parent):
        return _FAILED
    with node_folder.node_folder(parent) as folder:
        caches = {"TRITON_CACHE_DIR": str(folder / "triton"), "CUDA_CACHE_PATH": str(folder / "cuda")}
        return _start_deaf(torchrun(options, number), {**os.environ, **caches}).wait()


def _start_deaf(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # What is ignored stays so in a new program.
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        return subprocess.Popen(command, env=environment)
    finally:
        signal.signal(signal.SIGTERM, handler)


def node_number(nodes: Sequence[str]) -> int:
    """This node's place in the job's list, the head node's being 0.

    SLURM_NODEID counts in an order of its own where tasks are spread otherwise, and host names need not be SLURM's.

    Raises:
        ConfigError: it is none of them.
    """
    own = os.environ.get("SLURMD_NODENAME", "")
    if own not in nodes:
        raise ConfigError(f"SLURMD_NODENAME={own!r} is none of the job's nodes {', '.join(nodes)}")
    return list(nodes).index(own)


def torchrun(options: argparse.Namespace, number: int) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        f"--nnodes={len(options.nodes)}",
        f"--node-rank={number}",
        f"--nproc-per-node={options.processes}",
        f"--master-addr={options.nodes[0]}",
        f"--master-port={options.port}",
        "--rdzv-conf=timeout=600",
        "--max-restarts=0",
        "--signals-to-handle=SIGINT",
        *("-m", "palimpsa_launch.rank", str(options.logs)),
        *options.command,
    ]


def _is_ready(options: argparse.Namespace, number: int, local_folder: Path) -> bool:
    """Take part in the pre-flight check; -> whether all is well. The head node tells."""
    from palimpsa_launch.preflight.meeting import Job, meet

    start = time.monotonic()
    bounds = read_as(Preflight, json.loads(options.preflight), "preflight")
    job = Job(options.nodes, options.check_port, options.processes, options.gpus, bounds)
    node = options.nodes[number]
    is_good, report = meet(
        job, number, lambda: node_facts(node, options.stage_folder, local_folder, options.gpus, bounds.seconds)
    )
    if report is None:
        return is_good
    text = json.dumps(dataclasses.asdict(report) | {"seconds": round(time.monotonic() - start, 1)}, indent=2)
    (options.logs / "preflight.json").write_text(text + "\n")
    verdict = report.verdict
    for name, problems in verdict.bad.items():
        for problem in problems:
            print(f"pre-flight: {name}: {problem}", flush=True)
    for error in verdict.errors:
        print(f"pre-flight: {error}", flush=True)
    if is_good:
        speed = report.allreduce[0]["gb_s"]
        print(f"pre-flight: all well, all-reduce {speed:.3g} GB/s, {time.monotonic() - start:.1f} s", flush=True)
    elif not Path(os.environ["PALIMPSA_STOP_FILE"]).exists():  # what was killed on the way is no node's fault
        # Read by the batch script.
        (options.logs / "bad-nodes").write_text("".join(f"{name}\n" for name in verdict.bad))
    return is_good


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="palimpsa_launch.node", description=__doc__)
    parser.add_argument("--nodes", type=str.split, required=True, help="the job's nodes, the head node first")
    parser.add_argument("--port", type=int, required=True, help="on the head node, for training")
    parser.add_argument("--check-port", type=int, required=True, help="on the head node, for the pre-flight check")
    parser.add_argument("--processes", type=int, required=True, help="of a node")
    parser.add_argument("--gpus", type=int, required=True, help="of a node")
    parser.add_argument("--stage-folder", type=Path, required=True)
    parser.add_argument("--logs", type=Path, required=True, help="folder of this attempt's logs")
    parser.add_argument("--local-folder", required=True, help="on the node's own disk; '' takes the cluster's")
    parser.add_argument("--preflight", required=True, help="its bounds as JSON; null leaves it out")
    parser.add_argument("command", nargs="+", metavar="ARGUMENT", help="of megatron-palimpsa, for every rank")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
