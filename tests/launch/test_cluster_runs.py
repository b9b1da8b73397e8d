"""A user's side of runs on a real SLURM with virtual nodes: mistakes, names, cancel and resume, arrays of `prep`."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from helpers.bpe import unicode_text, write_tokenizer
from helpers.mini_slurm import mini_slurm, reason_to_skip, wait_until
from helpers.published_mamba2 import random_mamba2
from helpers.runs import VOCAB_SIZE, write_stage
from helpers.slurm_script import write_trainer
from helpers.standin_chain import StandInChain

from megatron_palimpsa import cli
from megatron_palimpsa.training.run_folder import RunFolder


@pytest.fixture(scope="module")
def cluster():
    if reason := reason_to_skip():
        pytest.skip(reason)
    with mini_slurm(gpus=4) as slurm:
        yield slurm


@pytest.fixture
def chain(cluster, tmp_path, tiny_data, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    evaluation = "cp {python} '{folder}/score of it'"
    return StandInChain(tmp_path, tiny_data, cluster, evaluation=evaluation)


def no_jobs(cluster) -> bool:
    return cluster.call("squeue", "--noheader", "--states=PENDING,RUNNING") == ""


WIDE = ("train.global_batch_tokens=256", "optimizer.warmup_steps=0")  # eight ranks have work


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--partition", "gone"), "invalid partition specified: gone"),
        (("--partition", "short", "--time", "60"), "time limit"),
        (
            ("--gpus-per-node", "8", *WIDE),
            "debug has 2 nodes of 8 cores and gpu:4",
        ),
        (("--nodes", "4", *WIDE), "debug has 2 nodes"),
        (("data.train_blend=absent.yaml",), "data.train_blend=absent.yaml: cannot read the blend"),
        (("output_dir=/proc/nowhere",), "output_dir: "),
        (("parallel.cp=3",), "parallel.cp=3 does not divide model.seq_length"),
        (("train.tokenz=5",), "unknown key 'train.tokenz'"),
        (("output_dir='/tmp/a\"b'",), "output_dir: SLURM may not take"),
        (("output_dir='/tmp/a$(touch x)'",), "output_dir: SLURM may not take"),
        (('output_dir="/tmp/a\\nb"',), "output_dir: SLURM may not take"),
        (("name='a b'",), "name='a b'"),
        (('evaluation="a \'b"',), "No closing quotation"),
        (("--container", "docker:x"), "container.engine='docker'"),
    ],
)
def test_each_mistake_is_one_message_and_nothing_is_submitted(cluster, chain, capsys, options, expected):
    if "--gpus-per-node" in options:
        settings = yaml.safe_load(chain.job.read_text())
        del settings["processes_per_node"]
        chain.job.write_text(yaml.safe_dump(settings))
    assert chain.submit(*options) == 2
    captured = capsys.readouterr()
    (message,) = captured.err.splitlines()
    assert expected in message
    assert captured.out == ""
    assert no_jobs(cluster)
    assert not chain.runs.exists()


def test_of_two_submits_at_the_same_instant_one_is_refused(cluster, chain):
    chain.behave("until_told; ends 75")
    command = [sys.executable, "-m", "megatron_palimpsa", "submit", *map(str, chain.recipes), "--job", str(chain.job)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [(*process.communicate(timeout=240), process.returncode) for process in both]
    assert sorted(code for *_, code in answers) == [0, 2]
    (refused,) = (err for _, err, code in answers if code == 2)
    assert "already; let it go on, or end it with megatron-palimpsa cancel" in refused
    assert len(cluster.call("squeue", "--noheader").splitlines()) == 3  # two stages and an evaluation
    assert cli.main(["cancel", str(chain.runs), "--now"]) == 0
    wait_until("the end of all jobs", lambda: no_jobs(cluster))


def test_cancel_resume_save_now_and_what_status_says(chain, capsys):
    def status() -> tuple[int, str]:
        code = cli.main(["status", str(chain.runs)])
        return code, capsys.readouterr().out

    chain.behave("until_told; reach 4; ends 75")
    assert chain.submit() == 0
    chain.wait_for_attempt("first", 0)
    capsys.readouterr()
    code, text = status()
    assert code == 75
    assert f"first   running  {chain.job_id('first')} on node" in text
    assert "second: SLURM says Dependency on first" in text
    assert cli.main(["save-now", str(chain.runs)]) == 0
    assert RunFolder(chain.runs / "first").save_now.exists()
    assert cli.main(["resume", str(chain.runs)]) == 2
    assert "the run goes on by itself" in capsys.readouterr().err
    assert cli.main(["cancel", str(chain.runs)]) == 0
    chain.wait_for("first", "FAILED")
    chain.wait_for("second", "CANCELLED")
    assert (chain.runs / "first" / "checkpoints" / "latest").read_text() == "step-4\n"
    capsys.readouterr()
    code, text = status()
    assert code == 1
    assert "first   stopped" in text
    assert "second: never started, because first stopped" in text
    assert cli.main(["logs", str(chain.runs), "--job"]) == 0
    assert "told to end" in capsys.readouterr().out
    chain.behave("[[ -d $stage/checkpoints ]] && complete")
    assert cli.main(["resume", str(chain.runs)]) == 0
    chain.wait_for("second", "COMPLETED")
    evaluated = RunFolder(chain.runs / "first")
    wait_until("the evaluation", lambda: evaluated.is_evaluated)
    assert (chain.runs / "first" / "score of it").exists()
    capsys.readouterr()
    code, text = status()
    assert code == 0
    assert "first: evaluated" in text


def test_names_that_a_shell_would_run_are_names(chain, tmp_path, monkeypatch):
    folder = tmp_path / 'it\'s $(touch broken) `touch out` "q"; *'
    folder.mkdir()
    monkeypatch.chdir(folder)
    settings = yaml.safe_load(chain.job.read_text())
    settings["variables"] = {"NCCL_DEBUG": "$(touch broken) 'a' \"b\" \\"}
    chain.job.write_text(yaml.safe_dump(settings))
    chain.behave('echo "$PWD|$NCCL_DEBUG" >"$stage/seen"; complete')
    assert chain.submit() == 0
    chain.wait_for("second", "COMPLETED")
    assert (chain.runs / "first" / "seen").read_text() == f"{folder}|{settings['variables']['NCCL_DEBUG']}\n"
    assert list(folder.iterdir()) == []


def write_preparation(folder: Path, files: int, tasks: int) -> Path:
    """A preparation of as many input files; every third has an empty row too."""
    draw = random.Random(files)
    (folder / "in").mkdir()
    for number in range(files):
        rows = [{"text": unicode_text(draw) or "x"} for _ in range(1 + number % 3)] + [{"text": ""}] * (number % 3 == 0)
        (folder / "in" / f"{number:03}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = write_tokenizer(folder)
    command = f"prep text in --output sets/text --tokenizer {tokenizer.name} --backend huggingface"
    recipe = {
        "name": "data",
        "output_dir": "runs/mine",
        "arrays": {"text": {"command": command, "tasks": tasks}},
        "then": ["prep blend blend.yaml --set sets/text"],
        "job": {"python": sys.executable, "exclusive": False, "cpus_per_node": 4, "memory": "2G"},
    }
    (folder / "data.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "data.yaml"


JOB = ("--time", "60", "--gpus-per-node", "0", "--processes-per-node", "1")


def job_of(run: Path, step: str, name: str) -> str:
    return str(json.loads((run / step / "job" / "submission.json").read_text())["jobs"][name])


def test_array_of_prep_feeds_the_stage_behind_it(cluster, tmp_path, tiny_data, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    write_preparation(tmp_path, files=4, tasks=3)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({"python": str(write_trainer(tmp_path))}))
    stage = write_stage(tmp_path, tiny_data, output_dir="runs/mine", model={"vocab_size": 300})
    behaviour = tmp_path / "runs" / "mine" / "stage" / "behaviour"
    behaviour.parent.mkdir(parents=True)
    behaviour.write_text("[[ -e blend.yaml ]] && complete")
    data = ("data.train_blend=blend.yaml", "data.valid_blend=blend.yaml", "data.tokenizer=tokenizer.json")
    command = ["submit", "data.yaml", str(stage), "--job", "job.yaml", *JOB, *data]
    assert cli.main(command) == 0
    wait_until("the stage", (behaviour.parent / "STAGE_COMPLETE").exists)
    capsys.readouterr()
    assert cli.main(["prep", "verify", "sets/text"]) == 0
    assert "4 shards" in capsys.readouterr().out
    assert cli.main(command) == 0
    assert capsys.readouterr().out.count("complete already") == 2


@pytest.mark.long
def test_stage_waits_for_the_layers_that_are_measured_before_it(cluster, tmp_path, tiny_data, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    published = random_mamba2(vocab_size=VOCAB_SIZE, n_groups=1, num_hidden_layers=3)
    published.save_pretrained("published")
    sample = f"--blend {tiny_data}/valid.yaml --tokenizer {tiny_data}/tokenizer.model --tokens 64 --seq-length 32"
    layers = {
        "name": "layers",
        "output_dir": "runs/mine",
        "then": [
            "convert mamba2 published runs/mine/mamba2",
            f"convert select-layers runs/mine/mamba2 --layers 1 {sample} --output runs/mine/selection",
            "convert palimpsa runs/mine/mamba2 runs/mine/base --pattern runs/mine/selection/pattern.yaml",
        ],
        "job": {"python": sys.executable, "exclusive": False, "cpus_per_node": 4, "memory": "4G"},
    }
    (tmp_path / "layers.yaml").write_text(yaml.safe_dump(layers))
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({"python": str(write_trainer(tmp_path))}))
    start_from = {"stage": "base", "pattern": "source"}
    stage = write_stage(tmp_path, tiny_data, output_dir="runs/mine", model={"pattern": "MMP"}, init_from=start_from)
    behaviour = tmp_path / "runs" / "mine" / "stage" / "behaviour"
    behaviour.parent.mkdir(parents=True)
    behaviour.write_text("[[ -e runs/mine/base/STAGE_COMPLETE ]] && complete")
    command = ["submit", "layers.yaml", str(stage), "--job", "job.yaml", *JOB]
    # A mistake that only the job finds ends what is behind it; mended, the same command does the rest.
    (tmp_path / "published" / "config.json").rename(tmp_path / "config.json")
    assert cli.main(command) == 0
    train = job_of(tmp_path / "runs/mine", "stage", "train")
    wait_until("the end of what is behind", lambda: cluster.state(train) == "CANCELLED")
    capsys.readouterr()
    assert cli.main(["status", "mine"]) == 1
    assert "published/config.json: cannot be read" in capsys.readouterr().out
    (tmp_path / "config.json").rename(tmp_path / "published" / "config.json")
    assert cli.main(command) == 0
    wait_until("the stage", (behaviour.parent / "STAGE_COMPLETE").exists)
    capsys.readouterr()
    assert cli.main(command) == 0
    assert "layers: complete already" in capsys.readouterr().out


def test_failing_array_cancels_what_is_behind_it_and_says_why(cluster, tmp_path, tiny_data, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    recipe = write_preparation(tmp_path, files=2, tasks=2)
    (tmp_path / "in" / "001.jsonl").write_bytes(b"BZh91AY&SY")  # bzip2: no input
    assert cli.main(["submit", str(recipe), *JOB]) == 0
    finish = job_of(tmp_path / "runs/mine", "data", "finish")
    wait_until("the end of what is behind", lambda: cluster.state(finish) == "CANCELLED")
    capsys.readouterr()
    assert cli.main(["status", "mine"]) == 1
    out = capsys.readouterr().out
    assert "data: SLURM says FAILED; not requeued: exit code 2 (wrong input)" in out
    assert "001.jsonl is packed with bzip2" in out
    assert "srun" not in out


@pytest.mark.long
def test_hundred_tasks_with_kills_requeues_and_a_lost_node_end_with_a_set_that_verifies(
    cluster, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    recipe = write_preparation(tmp_path, files=100, tasks=100)
    assert cli.main(["submit", str(recipe), *JOB]) == 0
    run = tmp_path / "runs" / "mine"
    array, finish = job_of(run, "data", "text"), job_of(run, "data", "finish")
    draw = random.Random(7)
    done = {"killed": 0, "requeued": 0, "lost": 0}
    deadline = time.monotonic() + 1500
    while cluster.state(finish) not in ("COMPLETED", "FAILED", "CANCELLED"):
        assert time.monotonic() < deadline, done
        time.sleep(1)
        if sum(done.values()) < 30 and draw.random() < 0.5:
            _disturb(cluster, array, tmp_path, draw, done)
    assert cluster.state(finish) == "COMPLETED", (run / "data" / "logs" / f"job-{finish}.log").read_text()
    assert done["killed"] >= 5
    assert done["requeued"] >= 5
    assert done["lost"] == 1
    capsys.readouterr()
    assert cli.main(["prep", "verify", "sets/text"]) == 0
    assert "100 shards" in capsys.readouterr().out
    # Byte for byte what one process makes of the same files.
    alone = ["in", "--output", "alone/text", "--tokenizer", "tokenizer.json", "--backend", "huggingface"]
    assert cli.main(["prep", "text", *alone]) == 0
    shards = [path.name for path in Path("alone/text").glob("*.bin")] + ["set.json"]
    assert len(shards) == 101
    assert all((Path("alone/text") / name).read_bytes() == (Path("sets/text") / name).read_bytes() for name in shards)


def _disturb(cluster, array: str, folder: Path, draw: random.Random, done: dict[str, int]) -> None:
    kind = draw.choice(["killed", "requeued"])
    if done["lost"] == 0 and done["killed"] + done["requeued"] > 8:
        cluster.kill_node("node2")
        cluster.start_node("node2")
        done["lost"] += 1
    elif kind == "killed" and (processes := _tasks_of(folder)):
        with contextlib.suppress(ProcessLookupError):  # it has just come to its end
            os.kill(draw.choice(processes), signal.SIGKILL)
            done["killed"] += 1
    elif kind == "requeued":
        running = cluster.call("squeue", "--noheader", "--states=RUNNING", "--array", f"--jobs={array}", "-o%i").split()
        if running and subprocess.run(["scontrol", "requeue", draw.choice(running)], check=False).returncode == 0:
            done["requeued"] += 1


def _tasks_of(folder: Path) -> list[int]:
    """Processes of `prep` that work on a shard below the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes().split(b"\0")
            if b"--shard" in command and (path / "cwd").resolve() == folder and command[1] == b"-m":
                found.append(int(path.name))
        except OSError:
            continue
    return found
