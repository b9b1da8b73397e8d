"""`train` of several stages on this machine, in processes of their own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from helpers.bpe import write_tokenizer
from helpers.jobs import write_inputs
from helpers.published_mamba2 import random_mamba2
from helpers.runs import VOCAB_SIZE, Events, read_checkpoint, run, train_on_ranks, write_stage
from palimpsa_launch.local import run_here

from megatron_palimpsa import cli
from megatron_palimpsa.config import load_stage
from megatron_palimpsa.training.run_folder import RunFolder


@pytest.fixture
def recipe(tmp_path, tiny_data):
    """A run file of two stages; the first is evaluated."""
    evaluation = "{python} -c 'import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(\"7\")' {folder}/score"
    write_stage(tmp_path, tiny_data, "first", evaluation=evaluation)
    write_stage(tmp_path, tiny_data, "second", init_from={"stage": "first"})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"stages": ["first.yaml", "second.yaml"]}))
    return tmp_path / "run.yaml"


def start(*arguments) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "megatron_palimpsa", "train", *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def processes_of(folder: Path) -> list[str]:
    """Processes that have the folder on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line and "palimpsa_launch.rank" in line:
            found.append(line)
    return found


def test_killed_run_leaves_no_rank_behind_and_the_same_command_goes_on(recipe, tmp_path):
    first = RunFolder(tmp_path / "runs" / "first")
    command = (tmp_path / "first.yaml", "train.tokens=1536", "checkpoint.interval=2", "--nproc", "2")  # 24 steps
    with start(*command) as process:
        wait_for((first.checkpoints / "latest").exists)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    wait_for(lambda: not processes_of(first.path))
    assert not first.marker.exists()
    answer = run("train", *command)
    assert answer.returncode == 0, answer.stderr
    assert "Resuming from" in answer.stdout  # what the first rank logs is shown
    assert first.read_marker()["steps"] == 24
    assert (first.path / "score").read_text() == "7"
    (first.path / "score").unlink()
    assert "[1/1] first: complete already" in run("train", *command).stdout
    assert not (first.path / "score").exists()  # nor is it evaluated again


def test_logs_of_an_attempt_get_a_new_folder_where_older_ones_were_removed(tmp_path, tiny_data):
    stage = write_stage(tmp_path, tiny_data)
    logs = tmp_path / "runs" / "stage" / "logs"
    for number in (2, 10):
        (logs / f"local-{number}").mkdir(parents=True)
    for _ in range(2):
        run_here([stage], [], ranks=0)
    assert sorted(path.name for path in logs.iterdir()) == ["local-10", "local-11", "local-12", "local-2"]


@pytest.mark.long
def test_run_on_two_processes_goes_on_after_a_kill_and_a_stop(recipe, tmp_path):
    runs = tmp_path / "runs"
    first, second = RunFolder(runs / "first"), RunFolder(runs / "second")
    changes = ("train.tokens=1536", "checkpoint.interval=2", "--nproc", "2")  # 24 steps
    with start(recipe, *changes) as process:
        wait_for((first.checkpoints / "latest").exists)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    wait_for(lambda: not processes_of(runs))
    assert not first.marker.exists()
    with start(recipe, *changes) as process:
        wait_for((second.checkpoints / "latest").exists)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate()
    assert process.returncode == 75, out
    assert "step 24/24" in out
    answer = run("train", recipe, *changes)
    assert answer.returncode == 0, answer.stderr
    assert "[1/2] first: complete already" in answer.stdout
    assert second.read_marker()["steps"] == 24
    # The weights are those of stages that nobody disturbed.
    moved = (f"output_dir={tmp_path / 'other'}", "train.tokens=1536", "checkpoint.interval=2")
    for name in ("first", "second"):
        assert train_on_ranks(tmp_path / f"{name}.yaml", *moved, ranks=[Events()] * 2) == [0, 0]
    ends = []
    for number, output in enumerate((runs, tmp_path / "other")):
        (scratch := tmp_path / f"scratch-{number}").mkdir()
        ends.append(read_checkpoint(output / "second" / "checkpoints" / "step-24", scratch))
    assert ends[0].keys() == ends[1].keys()
    assert all(ends[0][key].equal(ends[1][key]) for key in ends[0])


def test_wrong_input_of_any_stage_is_found_before_the_first_starts(recipe, tmp_path, capsys):
    write_stage(tmp_path, tmp_path / "absent", "second", init_from={"stage": "first"})
    assert cli.main(["train", str(recipe)]) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert "second.yaml: data.tokenizer" in message
    assert not (tmp_path / "runs").exists()
    assert cli.main(["train", "optimizer.lr=1"]) == 2
    assert "no recipe is named" in capsys.readouterr().err
    assert cli.main(["train", "demo/nothing"]) == 2
    assert "neither a YAML file nor a packaged recipe" in capsys.readouterr().err


def test_dry_run_of_a_run_describes_every_stage(recipe, tmp_path, capsys):
    assert cli.main(["train", str(recipe), "--nproc", "2", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.count("layout         2 ranks") == 2
    assert f"weights of {tmp_path / 'runs' / 'first' / 'checkpoints' / 'step-8'}" in out
    assert not (tmp_path / "runs").exists()
    assert cli.main(["train", "demo/data", f"output_dir={tmp_path / 'runs'}", "--dry-run"]) == 0
    assert capsys.readouterr().out == f"preparation    data -> {tmp_path / 'runs' / 'data'}\n"


def test_preparation_and_a_stage_on_what_it_makes(tmp_path, monkeypatch, tiny_data):
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path / "in")
    vocabulary = write_tokenizer(tmp_path)
    command = f"prep fineweb in --output sets/web --tokenizer {vocabulary.name}"
    then = ["prep blend blend.yaml --set sets/web"]
    preparation = {"name": "data", "output_dir": "runs/mine", "arrays": {"web": {"command": command}}, "then": then}
    (tmp_path / "data.yaml").write_text(yaml.safe_dump(preparation))
    write_stage(tmp_path, tiny_data, output_dir="runs/mine", model={"vocab_size": 300})
    data = [f"data.{key}=blend.yaml" for key in ("train_blend", "valid_blend")]
    command = ["train", "data.yaml", "stage.yaml", *data, f"data.tokenizer={vocabulary.name}"]
    answer = run(*command)
    assert answer.returncode == 0, answer.stderr
    assert RunFolder(Path("runs/mine/stage")).read_marker()["steps"] == 8
    assert "[1/2] data: complete already" in run(*command).stdout


@pytest.mark.long
def test_layers_are_measured_and_turned_before_the_first_stage(tmp_path, monkeypatch, tiny_data):
    monkeypatch.chdir(tmp_path)
    source = random_mamba2(vocab_size=VOCAB_SIZE, n_groups=1, num_hidden_layers=4, tie_word_embeddings=True)
    with torch.no_grad():
        source.backbone.layers[1].mixer.A_log.fill_(-9.0)
    source.save_pretrained("published")
    sample = f"--blend {tiny_data}/valid.yaml --tokenizer {tiny_data}/tokenizer.model --tokens 64 --seq-length 32"
    layers = {
        "name": "layers",
        "output_dir": "runs",
        "then": [
            "convert mamba2 published runs/mamba2",
            f"convert select-layers runs/mamba2 --layers 1 {sample} --output runs/selection",
            "convert palimpsa runs/mamba2 runs/base --pattern runs/selection/pattern.yaml --beta-rank 4",
        ],
    }
    (tmp_path / "layers.yaml").write_text(yaml.safe_dump(layers))
    geometry = {
        "hidden_size": 32,
        "d_state": 16,
        "headdim": 8,
        "vocab_size": VOCAB_SIZE,
        "pattern": "MMMP",
        "beta_rank": 4,
    }
    for name, before in (("first", "base"), ("second", "first")):
        start_from = {"stage": before, "pattern": "source"}
        write_stage(tmp_path, tiny_data, name, output_dir="runs", model=geometry, init_from=start_from)
    command = ["train", "layers.yaml", "first.yaml", "second.yaml"]
    answer = run(*command)
    assert answer.returncode == 0, answer.stderr
    for name in ("first", "second"):
        assert RunFolder(Path("runs") / name).read_marker()["steps"] == 8
        assert load_stage(f"runs/{name}/config.yaml").model.pattern == "MPMM"
    assert run(*command).stdout.count("complete already") == 3


@pytest.mark.long
def test_packaged_demo_run_on_two_processes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = ("train.tokens=20K", "optimizer.warmup_steps=2", "train.eval_batches=1", "train.micro_batch_size=1")
    with start("demo/run", "--nproc", "2", *short) as process:
        out, _ = process.communicate(timeout=1700)
    assert process.returncode == 0, out
    for name in ("continue-pretraining", "long-context", "instruct"):
        assert RunFolder(tmp_path / "runs" / "demo" / name).read_marker()["tokens"] >= 20_000
