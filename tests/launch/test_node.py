"""A node in a job: its place in the list, what torchrun is told, signals and the folder that is gone afterwards."""

import fcntl
import os
import signal
import subprocess
import sys
import time

import pytest
from palimpsa_launch import node, node_folder

from megatron_palimpsa.config import ConfigError


def options(folder, *command):
    return [
        "--nodes=node7 node2 node30",
        "--port=20001",
        "--check-port=20002",
        "--processes=4",
        "--gpus=0",
        f"--stage-folder={folder}",
        f"--logs={folder}",
        f"--local-folder={folder}",
        "--preflight=null",
        "--",
        *command,
    ]


@pytest.mark.parametrize(("name", "expected"), [("node7", 0), ("node2", 1), ("node30", 2)])
def test_place_in_the_list_counts_whatever_slurm_counts(monkeypatch, name, expected):
    monkeypatch.setenv("SLURMD_NODENAME", name)
    monkeypatch.setenv("SLURM_NODEID", "2")
    assert node.node_number(["node7", "node2", "node30"]) == expected


def test_node_that_is_not_in_the_list_is_refused(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "node3")
    with pytest.raises(ConfigError, match="node3"):
        node.node_number(["node30"])


def test_torchrun_meets_at_the_head_node(tmp_path):
    arguments = node.torchrun(node._parse(options(tmp_path, "train", "--dry-run", "a b.yaml")), 1)
    assert arguments[:3] == [sys.executable, "-m", "torch.distributed.run"]
    # Deaf to SIGTERM, which would have it kill the ranks.
    assert "--signals-to-handle=SIGINT" in arguments
    for wanted in ("--nnodes=3", "--node-rank=1", "--nproc-per-node=4", "--master-addr=node7", "--master-port=20001"):
        assert wanted in arguments
    assert arguments[-6:] == ["-m", "palimpsa_launch.rank", str(tmp_path), "train", "--dry-run", "a b.yaml"]


_RANKS = """
import os, signal, sys, time
from pathlib import Path
from palimpsa_launch import node
# In the place of torchrun, which would listen to the signal unless it is made deaf.
node.torchrun = lambda options, number: [sys.executable, "-c", '''
import os, time
from pathlib import Path
folder = Path(os.environ["FOLDER"])
(folder / "caches").write_text(os.environ["TRITON_CACHE_DIR"])
while not (folder / "STOP").exists():
    time.sleep(0.02)
time.sleep(0.2)
raise SystemExit(7)
''']
sys.exit(node.main(sys.argv[1:]))
"""


def test_sigterm_makes_the_stop_file_and_ranks_end_by_themselves(tmp_path):
    environment = os.environ | {"SLURMD_NODENAME": "node2", "FOLDER": str(tmp_path)}
    environment |= {"PALIMPSA_STOP_FILE": str(tmp_path / "STOP"), "TRITON_CACHE_DIR": "/home/shared"}
    command = [sys.executable, "-c", _RANKS, *options(tmp_path, "train")]
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        deadline = time.monotonic() + 120
        while not (tmp_path / "caches").exists() or not (tmp_path / "caches").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        caches = (tmp_path / "caches").read_text()
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(timeout=240) == 7
    assert caches.startswith(f"{tmp_path}/megatron-palimpsa-{os.getuid()}-")
    assert not list(tmp_path.glob("megatron-palimpsa-*"))


def test_folders_of_killed_jobs_are_removed_and_those_of_living_ones_stay(tmp_path):
    dead, alive, foreign = (tmp_path / f"{node_folder._PREFIX}{name}" for name in ("dead", "alive", "new"))
    for folder in (dead, alive, foreign):
        folder.mkdir()
    (dead / "lock").touch()
    with (alive / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with node_folder.node_folder(tmp_path) as own:
            assert own.stat().st_mode & 0o777 == 0o700
            assert not dead.exists()
            node_folder.sweep(tmp_path)
            assert own.exists()
            assert alive.exists()
            assert foreign.exists()  # perhaps about to lock it
    assert not own.exists()


def test_place_of_the_folder():
    assert str(node_folder.place("/scratch", {"TMPDIR": "/b"})) == "/scratch"
    assert str(node_folder.place("", {"SLURM_TMPDIR": "/a", "TMPDIR": "/b"})) == "/a"
    assert str(node_folder.place("", {"TMPDIR": "/b"})) == "/b"
    assert str(node_folder.place("", {})) == "/tmp"
