"""A real SLURM of virtual nodes on this machine: as root, on loopback, without systemd.

Each node runs in UTS, mount and PID namespaces of its own, under its own host name, so that a job finds its head node
as on a real cluster and a node that is killed takes all its processes with it. Nothing outlives the process that
started the cluster, however that one ends: the kernel kills the daemons and a shell removes the folder.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "unshare", "setpriv")

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
SocketsPerBoard=1 CoresPerSocket=8 ThreadsPerCore=1 RealMemory=16000 State=UNKNOWN{gres}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=short Nodes=ALL MaxTime=10 State=UP
"""

# The shell is the namespace's first process and reaps what jobs leave behind, which slurmd would not.
_NODE = 'hostname "$1"; mount --bind "$2/hosts" /etc/hosts; slurmd -D -f "$2/slurm.conf" -N "$1" & wait'
_NAMESPACES = ("unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def reason_to_skip() -> str | None:
    """Why this machine cannot run one; None if it can."""
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    if os.getuid() != 0:
        return "virtual nodes need root"
    allowed = subprocess.run([*_NAMESPACES, "true"], capture_output=True, check=False)
    return "namespaces are refused" if allowed.returncode else None


def wait_until[T](what: str, condition: Callable[[], T], seconds: float = 240) -> T:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} has not come within {seconds} s"
        time.sleep(0.2)
    return value


@contextmanager
def mini_slurm(
    nodes: int = 2, extra: str = "", gpus: int = 0, kind: type[MiniSlurm] | None = None
) -> Iterator[MiniSlurm]:
    """A started cluster in a folder of its own; `extra` are more lines of slurm.conf, `gpus` (0 to 4) a node's."""
    # Munge wants a folder that every user may enter, which pytest's are not.
    folder = Path(tempfile.mkdtemp(prefix="mini-slurm-"))
    folder.chmod(0o755)
    # The shell sees the end of its input however this process ends.
    command = ["bash", "-c", 'trap "" INT TERM HUP; cat >/dev/null; sleep 1; rm -rf -- "$1"', "_", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
        cluster = (kind or MiniSlurm)(folder, nodes, extra, gpus)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


class MiniSlurm:
    """Clients need SLURM_CONF=`conf`."""

    def __init__(self, folder: Path, nodes: int, extra: str, gpus: int) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"
        self._extra = extra
        self._gpus = gpus
        self._nodes = [f"node{number}" for number in range(1, nodes + 1)]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        folder, port = self.folder, free_ports(len(self._nodes) + 1)
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
        gres = f" Gres=gpu:{self._gpus}\nGresTypes=gpu" if self._gpus else ""
        devices = ["null", "zero", "full", "random"][: self._gpus]  # any that are there: nothing opens them
        (folder / "gres.conf").write_text("".join(f"Name=gpu File=/dev/{name}\n" for name in devices))
        conf = _CONF.format(
            host=host, port=port, folder=folder, nodes=count, first=port + 1, last=port + count, gres=gres
        )
        self.conf.write_text(conf + self._extra)
        files = {"key-file": "munge/key", "socket": "run/munge.socket", "pid-file": "run/munged.pid"}
        files |= {"log-file": "log/munged.log", "seed-file": "munge/seed"}
        options = [f"--{key}={folder / value}" for key, value in files.items()]
        self.daemon("munged", "munged", "--foreground", "--num-threads=2", *options)
        wait_until("munge", (folder / "run" / "munge.socket").exists)
        self.before_controller()
        self.daemon("slurmctld", "slurmctld", "-D", "-c", "-f", str(self.conf))
        for name in self._nodes:
            self.start_node(name)
        wait_until("the cluster", self._is_idle)

    def before_controller(self) -> None:
        """For daemons that the controller needs."""

    def start_node(self, name: str) -> None:
        self.daemon(name, *_NAMESPACES, "bash", "-c", _NODE, "_", name, str(self.folder))

    def kill_node(self, name: str) -> None:
        """As if its power failed: slurmd and all that it started are gone at once."""
        self._daemons[name].kill()
        self._daemons[name].wait()

    def stop(self) -> None:
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
            daemon.wait()

    def daemon(self, name: str, *command: str) -> None:
        with (self.folder / "log" / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _is_idle(self) -> bool:
        answer = self.call("sinfo", "-hN", "-pdebug", "-tidle", "-o%N", check=False)
        return answer.count("\n") == len(self._nodes)

    def state(self, job: str) -> str:
        """Such as RUNNING; "" for one that is forgotten."""
        return self.call("squeue", "-h", "-tall", f"-j{job}", "-o%T", check=False).strip()

    def node_of(self, job: str) -> str:
        return self.call("squeue", "-h", f"-j{job}", "-o%N").strip()

    def call(self, *command: str, check: bool = True) -> str:
        answer = subprocess.run(
            command, env=self._environment(), capture_output=True, text=True, check=False, timeout=240
        )
        assert not check or answer.returncode == 0, f"{command}: {answer.stdout}{answer.stderr}"
        return answer.stdout

    def _environment(self) -> Mapping[str, str]:
        return os.environ | {"SLURM_CONF": str(self.conf)}


def free_ports(count: int, above: int = 17000) -> int:
    """The first of `count` free ports in a row, below those that clients get."""
    for first in range(above + os.getpid() % 1000, 32000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
    raise AssertionError("no free ports")
