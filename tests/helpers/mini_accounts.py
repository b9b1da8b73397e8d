"""A SLURM of virtual nodes with accounts: a database and slurmdbd of its own, on loopback."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

from helpers.mini_slurm import MiniSlurm, free_ports, reason_to_skip, wait_until

_PROGRAMS = ("slurmdbd", "sacctmgr", "mariadbd", "mariadb-install-db")

_CONF = """
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={folder}/run/munge.socket
AccountingStorageEnforce=associations,limits,qos
"""

_DBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.socket
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={storage}
StorageUser=slurm
StoragePass=slurm
LogFile={folder}/log/slurmdbd.log
PidFile={folder}/run/slurmdbd.pid
"""


def reason_to_skip_accounts() -> str | None:
    """Why this machine cannot run one; None if it can."""
    reason = reason_to_skip()
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    return reason or (f"{', '.join(missing)} not installed" if missing else None)


class AccountedSlurm(MiniSlurm):
    """Root may use the account `physics` with the QOS `normal` and `fast`; `closed` and `slow` are for nobody."""

    def __init__(self, folder: Path, nodes: int, extra: str, gpus: int) -> None:
        self._storage = free_ports(2, 24000)
        super().__init__(folder, nodes, extra + _CONF.format(port=self._storage + 1, folder=folder), gpus)

    def before_controller(self) -> None:
        folder, data = self.folder, self.folder / "database"
        self.call(
            "mariadb-install-db",
            "--no-defaults",
            f"--datadir={data}",
            "--user=root",
            "--skip-test-db",
            "--auth-root-authentication-method=normal",
        )
        statements = ["CREATE USER slurm@'127.0.0.1' IDENTIFIED BY 'slurm';", "GRANT ALL ON *.* TO slurm@'127.0.0.1';"]
        (folder / "accounts.sql").write_text("\n".join(statements) + "\n")
        options = {
            "user": "root",
            "datadir": data,
            "socket": folder / "run" / "database.socket",
            "pid-file": folder / "run" / "database.pid",
            "port": self._storage,
            "bind-address": "127.0.0.1",
            "init-file": folder / "accounts.sql",
            "innodb-buffer-pool-size": "16M",
        }
        arguments = [f"--{key}={value}" for key, value in options.items()]
        self.daemon("database", "mariadbd", "--no-defaults", "--skip-name-resolve", *arguments)
        wait_until("the database", lambda: _answers(self._storage))
        conf = folder / "slurmdbd.conf"
        host = socket.gethostname().split(".")[0]
        conf.write_text(_DBD_CONF.format(folder=folder, host=host, port=self._storage + 1, storage=self._storage))
        conf.chmod(0o600)
        self.daemon("slurmdbd", "slurmdbd", "-D")
        wait_until("slurmdbd", lambda: _answers(self._storage + 1))
        for command in (
            ("cluster", "mini"),
            ("qos", "fast"),
            ("qos", "slow"),
            ("account", "physics"),
            ("account", "closed"),
            ("user", "root", "account=physics", "qos=normal,fast", "defaultqos=normal"),
        ):
            self.call("sacctmgr", "--immediate", "add", *command, check=command[0] == "user")


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
