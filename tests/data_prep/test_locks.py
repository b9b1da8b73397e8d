"""Locks: one holder at a time, given back however the holder ends."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from palimpsa_data.locks import BusyError, holder, lock, this_process

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def test_one_holds_it_the_other_hears_who(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    with lock(path, wait=False):
        assert path.read_text() == this_process()
        assert holder(path) == this_process()
        with pytest.raises(BusyError, match=rf"x\.lock is held by {this_process()}"), lock(path, wait=False):
            pass
    assert not path.exists()
    assert holder(path) is None


def test_the_other_waits(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    order = []

    def second() -> None:
        with lock(path, wait=True):
            order.append("second")

    thread = threading.Thread(target=second)
    with lock(path, wait=True):
        thread.start()
        time.sleep(0.2)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]
    assert not path.exists()


def test_a_killed_holders_lock_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    with_lock = f"with lock(pathlib.Path({str(path)!r}), wait=True): print('held', flush=True); time.sleep(60)"
    code = f"import time, pathlib\nfrom palimpsa_data.locks import lock\n{with_lock}"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(BusyError, match=f"-{process.pid}"), lock(path, wait=False):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert path.exists()
    assert holder(path) is None
    with lock(path, wait=False):
        assert holder(path) == this_process()
    assert not path.exists()


def add_slowly(path: Path, count: int) -> None:
    for _ in range(count):
        with lock(path.with_suffix(".lock"), wait=True):
            value = int(path.read_text())
            time.sleep(0.001)
            path.write_text(str(value + 1))


def test_nothing_is_lost_between_many(tmp_path: Path) -> None:
    path = tmp_path / "counter"
    path.write_text("0")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=add_slowly, args=(path, 30)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert path.read_text() == "120"


def test_a_file_system_without_locks_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    entered = 0
    with lock(tmp_path / "x.lock", wait=False), lock(tmp_path / "x.lock", wait=True):
        entered += 1
    assert entered == 1
    assert not (tmp_path / "x.lock").exists()


def test_another_hosts_holder_is_believed(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    path.write_text("elsewhere-1")
    assert holder(path) == "elsewhere-1"
