"""launch/setup/find_python.sh against fake interpreters: scripts that hand the questions to this Python with a lie."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "setup" / "find_python.sh"

# Answers as Python VERSION lying at the wrapper's own place.
WRAPPER = """#!/bin/sh
exec "{python}" -S -c '
import sys, sysconfig
version = tuple(map(int, "{version}".split(".")))
sys.version_info = type("V", (), dict(major=version[0], minor=version[1], __getitem__=lambda self, i: version[i]))()
sys._base_executable = "{path}"
if {broken_venv}:
    sys.modules["ensurepip"] = None
config = sysconfig.get_config_var
sysconfig.get_config_var = lambda name: {free_threaded} if name == "Py_GIL_DISABLED" else config(name)
code = sys.argv[2] if sys.argv[1] == "-c" else sys.stdin.read()
sys.argv = sys.argv[1:]
exec(code)
' "$@"
"""


def fake_python(path: Path, version: str, *, ensurepip: bool = True, free_threaded: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {"python": sys.executable, "version": version, "path": path}
    path.write_text(WRAPPER.format(**values, broken_venv=not ensurepip, free_threaded=int(free_threaded)))
    path.chmod(0o755)
    return path


def failing_shim(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('#!/bin/sh\necho "pyenv: python3.12: command not found" >&2\nexit 127\n')
    path.chmod(0o755)


class Machine:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "bin"
        self.home = folder / "home"
        self.path.mkdir()
        self.home.mkdir()
        for tool in ("sh", "ls", "sort", "grep"):
            (self.path / tool).symlink_to(str(shutil.which(tool)))

    def find(self, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {"PATH": str(self.path), "HOME": str(self.home), **environment}
        return subprocess.run(["sh", str(SCRIPT)], env=variables, capture_output=True, text=True, timeout=240)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_takes_3_12_before_3_13(machine: Machine) -> None:
    fake_python(machine.path / "python3.13", "3.13.0")
    wanted = fake_python(machine.path / "python3.12", "3.12.4")
    assert machine.find().stdout.strip() == str(wanted)


def test_an_unversioned_python3_counts_by_what_it_is(machine: Machine) -> None:
    wanted = fake_python(machine.path / "python3", "3.13.2")
    assert machine.find().stdout.strip() == str(wanted)


def test_passes_over_a_failing_shim_to_pyenvs_newest_patch(machine: Machine) -> None:
    failing_shim(machine.path / "python3.12")
    fake_python(machine.path / "python3", "3.11.7")
    versions = machine.home / ".pyenv" / "versions"
    fake_python(versions / "3.12.1" / "bin" / "python", "3.12.1")
    fake_python(versions / "3.12.9" / "bin" / "python", "3.12.9")
    wanted = fake_python(versions / "3.12.10" / "bin" / "python", "3.12.10")
    assert machine.find().stdout.strip() == str(wanted)


def test_follows_pyenv_root(machine: Machine, tmp_path: Path) -> None:
    wanted = fake_python(tmp_path / "elsewhere" / "versions" / "3.13.1" / "bin" / "python", "3.13.1")
    assert machine.find(PYENV_ROOT=str(tmp_path / "elsewhere")).stdout.strip() == str(wanted)


def test_finds_what_uv_installed_without_uv_on_path(machine: Machine) -> None:
    folder = machine.home / ".local/share/uv/python/cpython-3.12.8-linux-x86_64-gnu"
    wanted = fake_python(folder / "bin" / "python3.12", "3.12.8")
    assert machine.find().stdout.strip() == str(wanted)


def test_asks_uv(machine: Machine, tmp_path: Path) -> None:
    wanted = fake_python(tmp_path / "managed" / "python3.12", "3.12.8")
    uv = machine.path / "uv"
    uv.write_text(f'#!/bin/sh\n[ "$1 $2 $3" = "python find 3.12" ] && echo "{wanted}"\n')
    uv.chmod(0o755)
    assert machine.find().stdout.strip() == str(wanted)


@pytest.mark.parametrize("version", ["3.11.7", "3.14.0", "2.7.18"])
def test_says_what_to_install(machine: Machine, version: str) -> None:
    fake_python(machine.path / "python3", version)
    result = machine.find()
    assert result.returncode == 1
    assert result.stdout == ""
    assert "no working Python 3.12 or 3.13" in result.stderr
    assert "uv python install 3.12" in result.stderr


def test_refuses_a_free_threaded_build(machine: Machine) -> None:
    fake_python(machine.path / "python3.13", "3.13.0", free_threaded=True)
    assert machine.find().returncode == 1


def test_without_ensurepip_names_the_package(machine: Machine) -> None:
    fake_python(machine.path / "python3.12", "3.12.3", ensurepip=False)
    result = machine.find()
    assert result.returncode == 1
    assert "apt install python3.12-venv" in result.stderr


def test_one_without_ensurepip_does_not_hide_a_good_one(machine: Machine) -> None:
    fake_python(machine.path / "python3.12", "3.12.3", ensurepip=False)
    wanted = fake_python(machine.path / "python3.13", "3.13.0")
    assert machine.find().stdout.strip() == str(wanted)


def test_the_python_the_user_names_is_the_only_one_tried(machine: Machine, tmp_path: Path) -> None:
    fake_python(machine.path / "python3.12", "3.12.3")
    wanted = fake_python(tmp_path / "own" / "python", "3.13.0")
    assert machine.find(PYTHON=str(wanted)).stdout.strip() == str(wanted)
    old = fake_python(tmp_path / "old" / "python", "3.11.7")
    result = machine.find(PYTHON=str(old))
    assert result.returncode == 1
    assert f"PYTHON={old}" in result.stderr


def test_the_real_machine_has_one() -> None:
    result = subprocess.run(["sh", str(SCRIPT)], env=os.environ, capture_output=True, text=True, timeout=240)
    version = subprocess.run([result.stdout.strip(), "--version"], capture_output=True, text=True, timeout=240).stdout
    assert version.startswith(("Python 3.12", "Python 3.13"))
