"""What is installed is complete, and installs nothing in anybody's way."""

import os
import re
import resource
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "megatron_palimpsa": ".",
    "palimpsa_kernels": "kernels",
    "palimpsa_launch": "launch",
    "palimpsa_data": "data_prep",
}
IMPORT_ALL = f"import {', '.join(PACKAGES)}"


def python(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=variables | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy of the sources, without a network."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name, place in PACKAGES.items():
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / place / name, source / place / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(output),
        str(source),
    ]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    return zipfile.ZipFile(next(output.glob("*.whl")))


def test_wheel_holds_every_module_recipe_and_template(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for package, place in PACKAGES.items():
        sources = [path for path in (ROOT / place / package).rglob("*") if path.suffix in (".py", ".yaml", ".sh")]
        assert sources
        missing = {path.relative_to(ROOT / place).as_posix() for path in sources} - names
        assert not missing


def test_wheel_puts_no_other_name_on_the_import_path(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == set(PACKAGES)


def test_wheel_works_unpacked_elsewhere(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "unpacked")
    code = f"{IMPORT_ALL}; from palimpsa_launch import stages; print(stages.path('demo/instruct'))"
    result = python(code, tmp_path, PYTHONPATH=str(tmp_path / "unpacked"))
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).is_relative_to(tmp_path / "unpacked")


def test_the_installed_packages_import_from_any_folder(tmp_path: Path) -> None:
    result = python(IMPORT_ALL, tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("folder", [ROOT, ROOT / "kernels", None])
def test_transformers_still_imports(folder: Path | None, tmp_path: Path) -> None:
    # It probes for a package called `kernels`, which is the name of one of our folders.
    result = python(f"{IMPORT_ALL}; from transformers import Mamba2ForCausalLM", folder or tmp_path)
    assert result.returncode == 0, result.stderr


def test_help_answers_within_a_second_and_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys, megatron_palimpsa.cli as cli\n"
        "try: cli.main(['--help'])\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = python(code, tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "train" in result.stdout
    assert result.stderr.strip() == "False"
    # Of the processor, which is the whole of it where no other process wants the cores.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def constraint_lines() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_constraints_are_names_and_exact_versions_only() -> None:
    for line in constraint_lines():
        assert re.fullmatch(r"[a-z0-9-]+==[0-9][0-9A-Za-z.]*", line), line
    assert not re.search(r"://|/|@", (ROOT / "constraints.txt").read_text())


def test_constraints_pin_every_direct_requirement_within_its_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(line.split("==") for line in constraint_lines())
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    for requirement in (Requirement(text) for group in groups for text in group):
        name = requirement.name.lower()
        if name == project["name"]:  # an extra that takes in another one
            continue
        assert name in pins, f"{name} has no version in constraints.txt"
        assert requirement.specifier.contains(pins[name]), f"{name}=={pins[name]} is outside {requirement.specifier}"
