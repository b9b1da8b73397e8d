"""A real SLURM of virtual nodes on this machine: as root, on loopback, without systemd.

Each node runs in a UTS and a mount namespace of its own, under its own host name, so that a job finds its head node as
on a real cluster.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "unshare", "ip", "ss")

_CONF = """\
ClusterName=mini
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.socket,cred_expire=5
CommunicationParameters=NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
PlugStackConfig={folder}/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/log/jobcomp.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,sched_min_interval=0,batch_sched_delay=0
SlurmdParameters=config_overrides
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
InactiveLimit=0
KillWait=5
MinJobAge=300
JobRequeue=1
EnforcePartLimits=ALL
NodeName=node[1-{nodes}] NodeHostname=node[1-{nodes}] NodeAddr=127.0.1.[1-{nodes}] Port=[{first}-{last}] CPUs=8 \
SocketsPerBoard=1 CoresPerSocket=8 ThreadsPerCore=1 RealMemory=16000 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=short Nodes=ALL MaxTime=10 State=UP
"""

_NODE = 'hostname "$1"; mount --bind "$2/hosts" /etc/hosts; exec slurmd -f "$2/slurm.conf" -N "$1"'


def reason_to_skip() -> str | None:
    """Why this machine cannot run one; None if it can."""
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    if os.getuid() != 0:
        return "virtual nodes need root"
    allowed = subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True, check=False)
    return "namespaces are refused" if allowed.returncode else None


def wait_until[T](what: str, condition: Callable[[], T], seconds: float = 120) -> T:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} has not come within {seconds} s"
        time.sleep(0.2)
    return value


class MiniSlurm:
    """Start with `start`; end with `stop`, which leaves no process behind. Clients need SLURM_CONF=`conf`."""

    def __init__(self, folder: Path, nodes: int = 2) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"
        self._nodes = [f"node{number}" for number in range(1, nodes + 1)]

    def start(self) -> None:
        folder, port = self.folder, _free_ports(len(self._nodes) + 1)
        for name in ("log", "run", "state", "spool", "munge"):
            (folder / name).mkdir(parents=True)
        (folder / "munge").chmod(0o700)
        (folder / "munge" / "key").write_bytes(os.urandom(128))
        (folder / "munge" / "key").chmod(0o600)
        (folder / "plugstack.conf").touch()
        names = "".join(f"127.0.1.{number} {name}\n" for number, name in enumerate(self._nodes, 1))
        (folder / "hosts").write_text(Path("/etc/hosts").read_text() + names)
        host = socket.gethostname().split(".")[0]
        count = len(self._nodes)
        self.conf.write_text(
            _CONF.format(host=host, port=port, folder=folder, nodes=count, first=port + 1, last=port + count)
        )
        files = {"key-file": "munge/key", "socket": "run/munge.socket", "pid-file": "run/munged.pid"}
        files |= {"log-file": "log/munged.log", "seed-file": "munge/seed"}
        self._call("munged", "--num-threads=2", *(f"--{key}={folder / value}" for key, value in files.items()))
        self._call("slurmctld", "-c", "-f", str(self.conf))
        for name in self._nodes:
            self.start_node(name)
        wait_until("the cluster", lambda: self._call("sinfo", "-hN", "-pdebug", "-tidle", "-o%N").count("\n") == count)

    def start_node(self, name: str) -> None:
        self._call("unshare", "--uts", "--mount", "bash", "-c", _NODE, "_", name, str(self.folder))

    def kill_node(self, name: str) -> None:
        """As if its power failed: slurmd and all that it started."""
        daemon = int((self.folder / "run" / f"slurmd-{name}.pid").read_text())
        steps = self._sockets(f"spool/{name}/")
        for process in [daemon, *(child for step in steps for child in _descendants(step)), *steps]:
            _kill(process)

    def stop(self) -> None:
        if (self.folder / "run" / "slurmctld.pid").exists():
            self._call("scancel", "--user=root", "--quiet", check=False)
            wait_until("the end of all jobs", lambda: not self._call("squeue", "-h", "-tR,CG", check=False).strip(), 30)
        for name in (*(f"slurmd-{node}" for node in self._nodes), "slurmctld", "munged"):
            path = self.folder / "run" / f"{name}.pid"
            if path.exists():
                _end(int(path.read_text()))
        for process in self._sockets("spool/"):
            _kill(process)

    def state(self, job: str) -> str:
        """Such as RUNNING; "" for one that is forgotten."""
        return self._call("squeue", "-h", "-tall", f"-j{job}", "-o%T", check=False).strip()

    def node_of(self, job: str) -> str:
        return self._call("squeue", "-h", f"-j{job}", "-o%N").strip()

    def call(self, *command: str) -> str:
        return self._call(*command)

    def _call(self, *command: str, check: bool = True) -> str:
        environment = os.environ | {"SLURM_CONF": str(self.conf)}
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
        assert not check or answer.returncode == 0, f"{command}: {answer.stdout}{answer.stderr}"
        return answer.stdout

    def _sockets(self, below: str) -> list[int]:
        """Processes that listen in this cluster's spool folders: the steps' own daemons."""
        lines = self._call("ss", "-xlpH").splitlines()
        found = (part.split("pid=")[1:] for part in lines if f"{self.folder}/{below}" in part)
        return sorted({int(item.split(",")[0]) for items in found for item in items})


def _free_ports(count: int) -> int:
    """The first of `count` free ports in a row, below those that clients get."""
    for first in range(17000 + os.getpid() % 1000, 32000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
    raise AssertionError("no free ports")


def _descendants(process: int) -> list[int]:
    answer = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True)
    parents = {int(pid): int(parent) for pid, parent in map(str.split, answer.stdout.splitlines())}
    found = [process]
    for candidate in found:  # grows while it is walked
        found += [pid for pid, parent in parents.items() if parent == candidate]
    return found[1:]


def _kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return


def _end(process: int) -> None:
    try:
        os.kill(process, signal.SIGTERM)
        for _ in range(100):
            if "\nState:\tZ" in Path(f"/proc/{process}/status").read_text():
                return
            time.sleep(0.1)
        os.kill(process, signal.SIGKILL)
    except (ProcessLookupError, FileNotFoundError):
        return
