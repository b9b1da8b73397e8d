"""Worker processes are born deaf to Ctrl-C: the process that started them ends them."""

from __future__ import annotations

import multiprocessing
import signal
from pathlib import Path

from palimpsa_data.workers import Workers


def blocked(process: int) -> set[signal.Signals]:
    status = Path(f"/proc/{process}/status").read_text()
    mask = int(status.partition("SigBlk:")[2].split()[0], 16)
    return {number for number in signal.Signals if mask >> (number - 1) & 1}


def test_ctrl_c_never_reaches_a_worker_not_even_while_it_imports() -> None:
    before = multiprocessing.active_children()
    with Workers(2, 1, print, ()):
        born = [child.pid for child in multiprocessing.active_children() if child not in before]
        assert len(born) == 2
        assert all(signal.SIGINT in blocked(pid) for pid in born if pid is not None)
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
