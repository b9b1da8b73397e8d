import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_palimpsa.lifeline import tied_process

# Writes its and its own child's process ids, then both sleep.
SLEEPER = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
temporary = sys.argv[1] + ".tmp"
with open(temporary, "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.replace(temporary, sys.argv[1])
time.sleep(120)
"""

PARENT = """
import os, sys
from megatron_palimpsa.lifeline import tied_process
with tied_process("sleeper", [sys.argv[1]], os.environ) as process:
    process.wait()
"""


@pytest.fixture
def python_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def wait_until(condition: object, what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def is_alive(process: int) -> bool:
    """Zombies, which a container without an init process keeps, count as dead."""
    state = subprocess.run(["ps", "-p", str(process), "-o", "stat="], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")


def test_child_and_grandchild_die_with_a_killed_parent(python_path: Path) -> None:
    ids = python_path / "ids"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(ids)])
    wait_until(ids.exists, "the child never started")
    child, grandchild = map(int, ids.read_text().split())
    assert is_alive(child)
    assert is_alive(grandchild)
    parent.kill()
    assert parent.wait(timeout=240) == -signal.SIGKILL
    wait_until(lambda: not is_alive(child), "the child outlived its parent")
    wait_until(lambda: not is_alive(grandchild), "the grandchild outlived its parent")


def test_the_end_of_the_context_ends_the_child(python_path: Path) -> None:
    with tied_process("sleeper", [str(python_path / "ids")], os.environ) as process:
        pass
    assert process.returncode == -signal.SIGKILL


def test_arguments_and_exit_code_pass_through(python_path: Path) -> None:
    (python_path / "leaver.py").write_text("import sys; sys.exit(int(sys.argv[1]) + len(sys.argv))")
    with tied_process("leaver", ["73"], os.environ) as process:
        assert process.wait(timeout=240) == 75


def test_descriptors_stay_open_in_the_child(python_path: Path) -> None:
    (python_path / "writer.py").write_text('import os, sys; os.write(int(sys.argv[1]), b"kept")')
    read_end, write_end = os.pipe()
    with tied_process("writer", [str(write_end)], os.environ, keep_open=[write_end]) as process:
        process.wait(timeout=240)
    os.close(write_end)
    assert os.read(read_end, 16) == b"kept"
    os.close(read_end)
