"""Rendered batch scripts: valid shell whatever the user's names are, and nothing of them is ever run."""

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from palimpsa_launch.job import load_job
from palimpsa_launch.render import job_name, render_stage, render_task

from megatron_palimpsa.config import ConfigError

FOLDER = Path("/runs/a stage")
WORK = Path("/home/me/project")
COMMAND = ["train", "/runs/a stage/job/stage.yaml"]
JOBS = {
    "plain": {},
    "everything": {
        "nodes": 8,
        "partition": "gpu,long",
        "account": "a.b",
        "qos": "high",
        "constraint": "[h200|h100]&ib",
        "exclude": "node[1-3,7]",
        "exclusive": False,
        "cpus_per_node": 64,
        "memory": "500G",
        "variables": {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "^lo,docker $(touch x)"},
    },
    "nasty": {
        "variables": {"NCCL_DEBUG": "~/x `y` \"$z\" 'a' \\ *"},
        "local_folder": "/a b$(touch x)'`y`",
        "exclude": "node[1-3]",
        "preflight": {"allreduce_gb_s": 10.5},
    },
    "cpu": {"gpus_per_node": 0, "processes_per_node": 2},
    "apptainer": {"container": {"engine": "apptainer", "image": "/i m/x.sif", "mounts": ["/data", "/a b:/b:ro"]}},
    "pyxis": {"container": {"engine": "pyxis", "image": "nvcr.io#nvidia/pytorch:25.01", "mounts": ["/data"]}},
}


def render(folder=FOLDER, work=WORK, command=COMMAND, **job) -> str:
    return render_stage(load_job(None, {"time": "2-00:00:00"} | job), "stage-1", folder, work, command)


def task(tasks=None, marker=None, **job) -> str:
    command = ["my program", "$(touch x)", "it's"]
    return render_task(load_job(None, {"time": "60"} | job), "task", FOLDER, WORK, command, tasks=tasks, marker=marker)


def settings(script: str) -> str:
    return script.split("# ---- settings\n")[1].split("# ---- end of settings\n")[0]


def around_settings(script: str) -> tuple[str, str]:
    before, after = script.split("# ---- settings\n")
    return before, after.split("# ---- end of settings\n")[1]


def shell_values(script: str, *names: str) -> list[str]:
    """What bash holds in the variables after the settings, elements of arrays one by one."""
    shown = " ".join(f'"${{{name}[@]}}"' for name in names)
    answer = subprocess.run(
        ["bash", "-c", f"set -euo pipefail\n{settings(script)}\nprintf '%s\\0' {shown}"],
        capture_output=True,
        check=True,
    )
    return answer.stdout.decode().split("\0")[:-1]


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_scripts_are_valid_bash(job):
    script = render(**job)
    assert "%%" not in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_shellcheck_finds_nothing(job):
    for script in (render(**job), task(tasks=100, **job), task(marker=Path("/runs/it's done"), **job)):
        answer = subprocess.run(["shellcheck", "-"], input=script, capture_output=True, text=True, check=False)
        assert answer.returncode == 0, answer.stdout


def test_sbatch_lines_stand_before_the_first_command():
    lines = render(**JOBS["everything"]).splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    wanted = [line for line in lines if line.startswith("#SBATCH")]
    assert wanted == [line for line in lines[:first] if line.startswith("#SBATCH")]
    for line in (
        '#SBATCH --output="/runs/a stage/logs/job-%j.log"',
        "#SBATCH --nodes=8",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --cpus-per-task=64",
        "#SBATCH --mem=500G",
        "#SBATCH --time=2-00:00:00",
        "#SBATCH --signal=B:USR1@300",
        "#SBATCH --partition=gpu,long",
        "#SBATCH --constraint=[h200|h100]&ib",
        "#SBATCH --exclude=node[1-3,7]",
        "#SBATCH --requeue",
    ):
        assert line in wanted
    assert "#SBATCH --exclusive" not in wanted


def test_containers_get_folders_and_gpus():
    assert shell_values(render(**JOBS["apptainer"]), "enter") == [
        "apptainer",
        "exec",
        "--nv",
        "--bind=/runs/a stage",
        "--bind=/home/me/project",
        "--bind=/data",
        "--bind=/a b:/b:ro",
        "--pwd=/home/me/project",
        "/i m/x.sif",
    ]
    assert shell_values(render(**JOBS["pyxis"]), "srun_options") == [
        "--container-image=nvcr.io#nvidia/pytorch:25.01",
        "--container-mounts=/runs/a stage:/runs/a stage,/home/me/project:/home/me/project,/data:/data",
        "--container-workdir=/home/me/project",
    ]
    assert shell_values(render(**JOBS["pyxis"]), "python") == ["python3"]
    with pytest.raises(ConfigError, match="comma or a colon"):
        render(work=Path("/home/a,b"), **JOBS["pyxis"])


def test_defaults_are_explained_and_a_job_s_own_go_over_them():
    script = render()
    assert "# NCCL says in the ranks' logs why it fails" in script
    assert shell_values(script, "NCCL_DEBUG") == ["WARN"]
    own = render(variables={"NCCL_DEBUG": "INFO"})
    assert shell_values(own, "NCCL_DEBUG") == ["INFO"]
    assert "why it fails" not in own


def test_bounds_of_the_preflight_check_arrive():
    assert json.loads(*shell_values(render(**JOBS["nasty"]), "preflight"))["allreduce_gb_s"] == 10.5
    unchecked = dataclasses.replace(load_job(None, {"time": "60"}), preflight=None)
    script = render_stage(unchecked, "stage-1", FOLDER, WORK, COMMAND)
    assert shell_values(script, "preflight", "max_excluded") == ["null", "0"]
    assert shell_values(render(**JOBS["nasty"]), "exclude", "local_folder") == ["node[1-3]", "/a b$(touch x)'`y`"]
    with pytest.raises(ConfigError, match="gpu_memory_free"):
        render(preflight={"gpu_memory_free": 2.0})


@pytest.mark.parametrize("name", ["a\nb", 'a"b', "a'b", "a$(touch x)", "a`b`", "a%j", "a\\b", "a#b", "a;b"])
def test_folders_that_slurm_might_read_otherwise_are_refused(name):
    with pytest.raises(ConfigError, match="output_dir"):
        render(folder=Path("/runs") / name)


_NASTY = st.text(st.sampled_from("ab /\\'\"`$(){}[]<>|&;#!~*?%=,.-\n\r\t\0é\u2028")) | st.text()


@example("$(touch /tmp/broken-out)'; touch /tmp/broken-out #", "")
@example("a\nb", "")
@example("", '`x` "$HOME" \\')
@given(st.one_of(_NASTY), st.one_of(_NASTY))
def test_values_come_back_as_they_are_or_are_refused(text, other):
    """Whatever text a value is, bash holds that very text afterwards, and no other line of the script depends on it."""
    job = {"python": f"/{text}", "variables": {"NCCL_DEBUG": other}}
    try:
        script = render(work=Path("/w") / text.replace("\0", "\1"), command=["train", text, other], **job)
    except ConfigError:
        assert not (text.isprintable() and other.isprintable()) or len(text + other) > 4000
        return
    assert around_settings(script) == around_settings(render())
    values = shell_values(script, "python", "working_folder", "command", "NCCL_DEBUG")
    assert values == [f"/{text}", str(Path("/w") / text), "train", text, other, other]


def test_task_gets_its_command_its_share_and_a_log_of_its_own():
    script = task(tasks=100)
    assert '#SBATCH --output="/runs/a stage/logs/job-%A_%a.log"' in script
    assert shell_values(script, "command", "tasks") == ["my program", "$(touch x)", "it's", "100"]
    alone = task(marker=Path("/runs/it's done"))
    assert '#SBATCH --output="/runs/a stage/logs/job-%j.log"' in alone
    assert shell_values(alone, "tasks", "marker") == ["", "/runs/it's done"]


def test_runs_of_one_name_in_different_folders_do_not_wait_for_each_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    name = job_name("runs/demo", "pretrain")
    assert re.fullmatch(r"demo-[0-9a-f]{6}\.pretrain", name)
    assert job_name("link/runs/demo", "pretrain") == name
    assert job_name("other/demo", "pretrain") != name
    assert job_name("runs/demo", "pretrain.evaluation").startswith(f"{name}.")
