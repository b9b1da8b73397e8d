"""`submit`: what it refuses, what it prints, and what it asks of SLURM's commands, which are stand-ins here."""

import json
import os
import signal
import subprocess
import sys

import pytest
import yaml
from helpers.fake_slurm import FakeSlurm
from helpers.runs import write_stage
from helpers.slurm_script import write_program

from megatron_palimpsa import cli
from megatron_palimpsa.config import load_stage
from megatron_palimpsa.training.run_folder import RunFolder

JOB = ("--time", "60", "--nodes", "2", "--gpus-per-node", "0", "--processes-per-node", "1")


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    fake = FakeSlurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{fake.folder}:{os.environ['PATH']}")
    return fake


@pytest.fixture
def stages(tmp_path, tiny_data):
    first = write_stage(tmp_path, tiny_data, "first")
    return first, write_stage(tmp_path, tiny_data, "second", init_from={"stage": "first"})


def submit(*arguments) -> int:
    return cli.main(["submit", *map(str, arguments)])


def refusal(capsys, *arguments) -> str:
    assert submit(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (message,) = captured.err.splitlines()
    return message


def mark_complete(tmp_path, stage) -> RunFolder:
    folder = RunFolder(load_stage(stage).folder)
    (folder.checkpoints / "step-8").mkdir(parents=True)
    folder.write_config(load_stage(stage))
    folder.write_marker({"steps": 8, "tokens": 512, "seconds": 3.0, "checkpoint": "checkpoints/step-8"})
    return folder


def test_dry_run_prints_plans_and_scripts_and_writes_nothing(capsys, tmp_path, stages, slurm):
    assert submit(*stages, *JOB, "--dry-run", "train.tokens=1K") == 0
    out = capsys.readouterr().out
    assert "layout         2 ranks" in out
    assert "1,000 in 16 steps" in out
    assert f"weights of {tmp_path / 'runs' / 'first' / 'checkpoints' / 'step-16'}" in out
    assert out.count("#!/usr/bin/env bash") == 2
    assert f"command=(train {tmp_path / 'runs' / 'second' / 'job' / 'stage.yaml'})" in out
    assert not (tmp_path / "runs").exists()
    assert slurm.calls() == []


def test_stage_that_starts_from_what_a_preparation_converts(capsys, tmp_path, tiny_data, slurm):
    made = tmp_path / "runs" / "base"
    layers = {"name": "layers", "output_dir": str(tmp_path / "runs"), "then": [f"convert mamba2 source {made}"]}
    (tmp_path / "layers.yaml").write_text(yaml.safe_dump(layers))
    stage = write_stage(tmp_path, tiny_data, init_from={"stage": "base", "pattern": "source"})
    assert "there is no stage folder" in refusal(capsys, stage, *JOB)
    assert submit(tmp_path / "layers.yaml", stage, *JOB, "--dry-run") == 0
    assert f"weights of {made}" in capsys.readouterr().out
    assert submit(tmp_path / "layers.yaml", stage, *JOB) == 0
    assert slurm.calls() == [
        "--parsable --dependency=singleton",
        "--parsable --dependency=afterok:101,singleton --kill-on-invalid-dep=yes",
    ]


def test_chain_is_submitted_with_dependencies_and_recorded(capsys, tmp_path, stages, slurm, monkeypatch):
    monkeypatch.setenv("SBATCH_PARTITION", "elsewhere")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert submit(*stages, *JOB, "optimizer.lr=0.02") == 0
    assert slurm.calls() == [
        "--parsable --dependency=singleton",
        "--parsable --dependency=afterok:101,singleton --kill-on-invalid-dep=yes",
    ]
    assert (slurm.folder / "environment").read_text() == ""
    assert "first: job 101" in capsys.readouterr().out
    for name, job in (("first", "101"), ("second", "102")):
        folder = tmp_path / "runs" / name
        assert (folder / "logs").is_dir()
        record = json.loads((folder / "job" / "submission.json").read_text())
        head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
        assert record["job_id"] == job
        assert record["git_commit"] == (head or None)
        config = load_stage(folder / "job" / "stage.yaml")
        assert (config.name, config.optimizer.lr) == (name, 0.02)
        assert yaml.safe_load((folder / "job" / "job.yaml").read_text())["nodes"] == 2
        assert str(folder / "job" / "stage.yaml") in (folder / "job" / "job.sh").read_text()


def test_complete_stages_are_left_out(capsys, tmp_path, stages, slurm):
    mark_complete(tmp_path, stages[0])
    assert submit(stages[0], *JOB) == 0
    assert "first: complete already" in capsys.readouterr().out
    assert slurm.calls() == []


def test_stage_with_a_job_in_the_queue_is_refused(capsys, tmp_path, stages, slurm):
    assert submit(*stages, *JOB) == 0
    capsys.readouterr()
    slurm.queue("102|RUNNING|None|node1")
    assert "runs/second has job 102 (RUNNING) already" in refusal(capsys, *stages, *JOB)
    assert len(slurm.calls()) == 2
    slurm.queue("102|FAILED|None|node1")
    assert submit(*stages, *JOB) == 0


def test_sbatch_refusal_is_one_message_and_nothing_is_written(capsys, tmp_path, stages, slurm):
    slurm.refuse("partition=gone")
    message = refusal(capsys, *stages, *JOB, "--partition", "gone")
    assert message.endswith("sbatch refuses the job: invalid partition specified: gone")
    assert not (tmp_path / "runs").exists()


def test_chain_that_is_refused_half_way_is_taken_back(capsys, stages, slurm):
    slurm.refuse("kill-on-invalid")
    assert "sbatch refuses the job" in refusal(capsys, *stages, *JOB)
    assert slurm.calls() == ["--parsable --dependency=singleton", "scancel 101"]


@pytest.mark.parametrize("name", ["TERM", "HUP", "INT"])
def test_submit_that_is_told_to_end_takes_back_what_it_submitted(stages, slurm, tmp_path, name):
    slurm.signal_at("101", name)
    assert submit(*stages, *JOB) == 130
    assert slurm.calls() == ["--parsable --dependency=singleton", "scancel 101"]
    assert not list((tmp_path / "runs").glob("*/job/submission.json"))


def test_submit_that_was_killed_leaves_a_run_that_can_be_cancelled_and_resumed(capsys, stages, slurm, tmp_path):
    slurm.signal_at("102", "KILL")
    command = [sys.executable, "-m", "megatron_palimpsa", "submit", *map(str, stages), *JOB]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    slurm.queue("101|PENDING|None|", "102|PENDING|Dependency|")
    assert "runs/first has job 101 (PENDING) already" in refusal(capsys, *stages, *JOB)
    run = str(tmp_path / "runs")
    assert cli.main(["status", run]) == 75
    assert "102" in capsys.readouterr().out  # nothing but the queue has this job's id
    assert cli.main(["cancel", run]) == 0
    assert slurm.calls()[-1] == "scancel 102 101"
    slurm.queue()
    (slurm.folder / "names").write_text("")
    capsys.readouterr()
    assert cli.main(["status", run]) in (1, 75)
    assert "second: its submit was cut short; megatron-palimpsa resume goes on" in capsys.readouterr().out
    assert cli.main(["resume", run]) == 0
    assert "second: job 104" in capsys.readouterr().out


def test_without_slurm(capsys, stages, monkeypatch, tmp_path):
    write_program(tmp_path / "only" / "bash", '#!/bin/sh\nexec /bin/bash "$@"\n')
    monkeypatch.setenv("PATH", str(tmp_path / "only"))
    assert "sbatch is not on PATH" in refusal(capsys, *stages, *JOB)
    assert submit(*stages, *JOB, "--dry-run") == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--time", "4"], "time=4 is 240 s"),
        (["--partition", "a b"], "partition='a b'"),
        (["--gpus-per-node", "0", "--nodes", "3", "parallel.tp=2"], "does not divide the number of ranks, which is 3"),
        (["--nodes", "3"], "train.global_batch_tokens=64 is not a multiple of 96"),
        (["data.train_blend=absent.yaml"], "data.train_blend=absent.yaml"),
        (["data.tokenizer=absent.model"], "absent.model"),
        (["train.tokenz=5"], "unknown key 'train.tokenz'"),
        (["parallel.cp=3"], "parallel.cp=3 does not divide model.seq_length"),
        (["output_dir=/proc/nowhere"], "output_dir"),
        (["output_dir='/tmp/a$(touch x)'"], "output_dir: SLURM may not take"),
        (['output_dir="/tmp/a\\nb"'], "output_dir: SLURM may not take"),
        (["--job", "absent.yaml"], "cannot read the configuration absent.yaml"),
    ],
)
def test_mistakes_are_one_message_and_nothing_is_submitted(capsys, stages, slurm, tmp_path, arguments, expected):
    assert expected in refusal(capsys, *stages, *JOB, *arguments)
    assert slurm.calls() == []
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ({"python": "/nowhere/python"}, "python='/nowhere/python' is not a program here"),
        ({"container": {"engine": "apptainer", "image": "/no.sif"}}, "container.image='/no.sif' is not there"),
        ({"container": {"engine": "pyxis", "image": "x", "mounts": ["/no"]}}, "container.mounts: '/no' is not there"),
    ],
)
def test_environment_that_is_not_there(capsys, stages, tmp_path, job, expected):
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    assert expected in refusal(capsys, *stages, *JOB, "--job", tmp_path / "job.yaml")


def test_second_stage_of_another_model_or_without_its_source(capsys, stages, tmp_path, tiny_data):
    assert "init_from.stage='first': there is no stage folder" in refusal(capsys, stages[1], *JOB)
    other = write_stage(tmp_path, tiny_data, "other", init_from={"stage": "first"}, model={"hidden_size": 32})
    assert "model.hidden_size is 16 there and 32 here" in refusal(capsys, stages[0], other, *JOB)
    assert "both train into" in refusal(capsys, stages[0], stages[0], *JOB)


def test_interval_that_an_attempt_does_not_reach(capsys, stages, tmp_path):
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    record = {"kind": "train", "step": 1, "tokens_per_second": 0.05}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    message = refusal(capsys, *stages, *JOB)
    assert "checkpoint.interval=4 steps take 1:25:20 at the 1.28e+03 s a step" in message
    assert "set checkpoint.interval to 1 or less" in message


def test_run_with_other_settings_is_refused(capsys, stages, tmp_path):
    mark_complete(tmp_path, stages[0])
    assert "holds a run with other settings: optimizer.lr" in refusal(capsys, *stages, *JOB, "optimizer.lr=0.5")
