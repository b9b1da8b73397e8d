"""launch/setup/setup.sh with an interpreter whose venv and pip are short scripts, so that nothing is downloaded."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FAKE_PYTHON = f"""#!/bin/sh
case "$*" in
    *_base_executable*) echo "$0" ;;
    *"-m venv"*) rm -rf .venv && mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *"-m pip install"*)
        echo "$*" >> pip-calls
        case "$(cat pip-does)" in
            succeed) touch .venv/package ;;
            fail) echo "ERROR: No matching distribution found for torch==0"; exit 1 ;;
            hang) touch .venv/half-a-package; exec sleep 60 ;;
        esac ;;
    *) exec "{sys.executable}" "$@" ;;
esac
"""


class Project:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "launch" / "setup", folder / "launch" / "setup")
        (folder / "pyproject.toml").write_text("[project]\n")
        (folder / "constraints.txt").write_text("torch==1\n")
        self.python = folder / "python"
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)
        self.pip_does("succeed")

    def pip_does(self, what: str) -> None:
        (self.folder / "pip-does").write_text(what)

    @property
    def pip_calls(self) -> list[str]:
        calls = self.folder / "pip-calls"
        return calls.read_text().splitlines() if calls.exists() else []

    def start(self, extra: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["sh", str(self.folder / "launch/setup/setup.sh"), extra],
            env={**os.environ, "PYTHON": str(self.python)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def set_up(self, extra: str) -> tuple[int, str]:
        process = self.start(extra)
        output, _ = process.communicate(timeout=240)
        return process.returncode, output


@pytest.fixture
def project(tmp_path: Path) -> Project:
    folder = tmp_path / "project with a space"
    folder.mkdir()
    return Project(folder)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.05)


def test_installs_once_with_the_constraints(project: Project) -> None:
    assert project.set_up("demo")[0] == 0
    assert project.set_up("demo") == (0, "")
    assert len(project.pip_calls) == 1
    assert project.pip_calls[0].endswith("-c constraints.txt -e .")


def test_what_tests_need_also_serves_the_demo_but_not_the_other_way_round(project: Project) -> None:
    project.set_up("demo")
    assert project.set_up("dev")[0] == 0
    assert project.pip_calls[1].endswith("-e .[dev]")
    assert project.set_up("demo") == (0, "")
    assert len(project.pip_calls) == 2


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt"])
def test_a_changed_requirement_installs_again_into_the_same_environment(project: Project, changed: str) -> None:
    project.set_up("demo")
    (project.folder / ".venv" / "kept").touch()
    (project.folder / changed).write_text("changed\n")
    assert project.set_up("demo")[0] == 0
    assert len(project.pip_calls) == 2
    assert (project.folder / ".venv" / "kept").exists()


def test_a_failing_install_says_why_and_where_and_is_repeated(project: Project) -> None:
    project.pip_does("fail")
    code, output = project.set_up("demo")
    assert code == 1
    assert "No matching distribution found for torch==0; the whole log: .venv/setup.log" in output.splitlines()[-1]
    project.pip_does("succeed")
    assert project.set_up("demo")[0] == 0


def test_a_killed_install_starts_anew(project: Project) -> None:
    project.pip_does("hang")
    process = project.start("demo")
    wait_for(project.folder / ".venv" / "half-a-package")
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(timeout=240) == -signal.SIGKILL
    project.pip_does("succeed")
    assert project.set_up("demo")[0] == 0
    assert not (project.folder / ".venv" / "half-a-package").exists()


def test_a_terminated_install_stops_pip_and_starts_anew(project: Project) -> None:
    project.pip_does("hang")
    process = project.start("demo")
    wait_for(project.folder / ".venv" / "installing")
    pip = int((project.folder / ".venv" / "installing").read_text())
    process.terminate()
    assert process.wait(timeout=240) == 130
    with pytest.raises(ProcessLookupError):
        os.kill(pip, 0)
    project.pip_does("succeed")
    assert project.set_up("demo")[0] == 0
    assert not (project.folder / ".venv" / "half-a-package").exists()


def test_a_moved_project_makes_its_environment_anew(project: Project) -> None:
    project.set_up("demo")
    (project.folder / ".venv" / "with-old-paths").touch()
    moved = project.folder.with_name("moved")
    project.folder.rename(moved)
    project.folder, project.python = moved, moved / "python"
    assert project.set_up("demo")[0] == 0
    assert not (moved / ".venv" / "with-old-paths").exists()


def test_refuses_while_pip_still_runs(project: Project) -> None:
    project.set_up("demo")
    pip = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "-m", "pip install"])
    try:
        (project.folder / ".venv" / "installed").unlink()
        (project.folder / ".venv" / "installing").write_text(f"{pip.pid}\n")
        code, output = project.set_up("demo")
        assert code == 1
        assert f"process {pip.pid}" in output
    finally:
        pip.kill()
        pip.wait()
