"""The command line: quick answers, exit codes, and one clear message for each wrong input before anything starts."""

import errno
import io
import json
import logging
import os
import resource
import shutil
import subprocess
import sys

import pytest
import torch
from helpers.runs import run, write_stage

from megatron_palimpsa import cli
from megatron_palimpsa.config import load_stage
from megatron_palimpsa.training.checkpoint_files import STATE
from megatron_palimpsa.training.checkpoint_state import FORMAT_VERSION, fingerprint
from megatron_palimpsa.training.run_folder import RunFolder


@pytest.fixture
def stage(tmp_path, tiny_data):
    return write_stage(tmp_path, tiny_data)


def refusal(capsys, *arguments) -> str:
    assert cli.main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (message,) = captured.err.splitlines()
    assert message.startswith("megatron-palimpsa: error: ")
    return message


_HELP = """
import sys
from megatron_palimpsa.cli import main
try:
    main(sys.argv[1:])
finally:
    heavy = {"torch", "megatron", "matplotlib", "wandb"} & set(sys.modules)
    assert not heavy, heavy
"""


_ANSWER = _HELP.replace("main(sys.argv[1:])", "sys.exit(main(sys.argv[1:]))")


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_help_answers_in_under_a_second_without_torch(arguments):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = subprocess.run([sys.executable, "-c", _HELP, *arguments], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert answer.returncode == 0, answer.stderr
    assert "usage: megatron-palimpsa" in answer.stdout
    # Processor time: the machine may be busy with other tests.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_complete_stage_answers_without_torch(stage, tmp_path):
    folder = RunFolder(tmp_path / "runs" / "stage")
    folder.path.mkdir(parents=True)
    folder.write_marker({"steps": 8, "tokens": 512, "seconds": 3.0, "checkpoint": "checkpoints/step-8"})
    answer = subprocess.run(
        [sys.executable, "-c", _ANSWER, "train", stage],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "Stage stage is complete already: 8 steps, 512 tokens, 0:00:03" in answer.stdout


@pytest.mark.parametrize(
    ("command", "says"), [("eval nll", "its 95 % band over documents"), ("prep demo", "Make the demo's SentencePiece")]
)
def test_help_of_a_command_says_what_it_does(capsys, command, says):
    with pytest.raises(SystemExit):
        cli.parse([*command.split(), "--help"])
    assert says in " ".join(capsys.readouterr().out.split())


def test_what_argparse_refuses_exits_2_too():
    for arguments in ([], ["fly"], ["train", "stage.yaml", "--fast"], ["report", "runs", "more"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == 2


def test_module_is_the_command():
    answer = run("--help")
    assert answer.returncode == 0
    for command in ("demo", "prep", "train", "generate", "report"):
        assert command in answer.stdout


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.tokenz=5", ["unknown key 'train.tokenz'", "known keys are tokens"]),
        ("model.hidden_size=wide", ["model.hidden_size='wide'", "integer"]),
        ("model.pattern=MXP", ["model.pattern='MXP'", "unknown letter 'X'", "allowed are P (Palimpsa-M)"]),
        ("parallel.tp=3", ["parallel.tp=3 does not divide the number of heads", "which is 4"]),
        ("train.global_batch_tokens=100", ["train.global_batch_tokens=100 is not a multiple of 32"]),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_2(capsys, stage, tmp_path, override, expected):
    for arguments in (["train", stage, override], ["train", stage, override, "--dry-run"]):
        message = refusal(capsys, *arguments)
        for part in expected:
            assert part in message
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("override", "start", "expected"),
    [
        ("data.train_blend=absent.yaml", "random weights", ["data.train_blend=absent.yaml", "prepare the data first"]),
        ("data.tokenizer=absent.model", "random weights", ["data.tokenizer=absent.model"]),
        ("model.vocab_size=100", "random weights", ["vocabulary of 320 ids", "model.vocab_size is 100"]),
        ("init_from.stage=nowhere", "weights of ", ["init_from.stage='nowhere'", "no stage folder"]),
    ],
)
def test_data_and_sources_are_missed_behind_the_plan(capsys, stage, tmp_path, override, start, expected):
    messages = [refusal(capsys, "train", stage, override)]
    assert cli.main(["train", str(stage), override, "--dry-run", "--ranks", "2"]) == 2
    captured = capsys.readouterr()
    for part in (f"starts from    {start}", "2 ranks: ", ": not checked", "memory a rank  about"):
        assert part in captured.out
    messages += captured.err.splitlines()
    assert messages == messages[:1] * 2
    for part in expected:
        assert part in messages[0]
    assert not (tmp_path / "runs").exists()


def test_missing_shard_file_is_named(capsys, tmp_path, tiny_data):
    data = tmp_path / "data"
    shutil.copytree(tiny_data, data)
    (shard,) = (data / "train").glob("*.bin")
    shard.unlink()
    assert shard.name in refusal(capsys, "train", write_stage(tmp_path, data))


def test_missing_file_circle_and_double_key(capsys, stage, tmp_path):
    assert "cannot read the configuration" in refusal(capsys, "train", tmp_path / "absent.yaml")
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    assert "base files form a circle" in refusal(capsys, "train", tmp_path / "a.yaml")
    stage.write_text(stage.read_text() + "name: again\n")
    assert "key 'name' is given twice" in refusal(capsys, "train", stage)


def test_no_disk_space(capsys, stage, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 10**5, 10**5))
    message = refusal(capsys, "train", stage)
    assert "no disk space for checkpoints" in message
    assert "0.0001 GB are free" in message
    assert not (tmp_path / "runs").exists()


def complete_stage(config_file):
    """Make it look as if the stage had been trained."""
    config = load_stage(config_file)
    folder = RunFolder(config.folder)
    (folder.checkpoints / "step-8").mkdir(parents=True)
    state = {"format_version": FORMAT_VERSION, "model": fingerprint(config.model)}
    (folder.checkpoints / "step-8" / STATE).write_text(json.dumps(state))
    folder.write_config(config)
    folder.write_marker({"steps": 8, "tokens": 512, "seconds": 3.0, "checkpoint": "checkpoints/step-8"})


def test_checkpoint_of_another_model(capsys, stage, tmp_path, tiny_data):
    complete_stage(stage)
    after = write_stage(tmp_path, tiny_data, "after", init_from={"stage": "stage"})
    message = refusal(capsys, "train", after, "model.hidden_size=32")
    assert "step-8: a checkpoint of another model: model.hidden_size is 16 in the checkpoint and 32 here" in message
    assert "model.hidden_size=32 (there 16)" in refusal(capsys, "train", stage, "model.hidden_size=32")


def test_stage_before_not_complete(capsys, stage, tmp_path, tiny_data):
    complete_stage(stage)
    RunFolder(tmp_path / "runs" / "stage").marker.unlink()
    after = write_stage(tmp_path, tiny_data, "after", init_from={"stage": "stage"})
    assert "that stage is not complete" in refusal(capsys, "train", after)


def test_dry_run_prints_the_plan_and_starts_nothing(capsys, stage, tmp_path):
    assert cli.main(["train", str(stage), "--dry-run", "train.tokens=1K"]) == 0
    plan = capsys.readouterr().out
    for part in (
        "random weights",
        "11,904 parameters",
        "1,000 in 16 steps of 64",
        "lr 0.01, 2 warm-up steps, cosine to 0.001",
        "train: 100.0 % of the sequences, 100.0 % filled",
        "memory a rank  about",
        "checkpoints    every 4 steps, 2 kept, about 1.21 MB each\n",
    ):
        assert part in plan
    assert not (tmp_path / "runs").exists()
    assert cli.main(["train", str(stage), "--dry-run", "checkpoint.async_save=true"]) == 0
    assert "about 1.21 MB each, from a copy of 143 kB in host memory a rank\n" in capsys.readouterr().out


def test_dry_run_and_wrong_input_answer_without_torch(stage):
    for arguments, code in ((["--dry-run"], 0), (["model.vocab_size=100"], 2), (["data.train_blend=absent"], 2)):
        answer = subprocess.run(
            [sys.executable, "-c", _ANSWER, "train", stage, *arguments], capture_output=True, text=True, check=False
        )
        assert answer.returncode == code, answer.stderr


def test_interrupt_is_130_without_a_traceback(capsys, stage, monkeypatch):
    from megatron_palimpsa.training import run as run_module

    def interrupted(config):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "train", interrupted)
    assert cli.main(["train", str(stage)]) == 130
    assert "interrupted" in capsys.readouterr().err
    monkeypatch.setattr(cli, "parse", interrupted)  # as early as while the commands' modules are imported
    assert cli.main(["train", str(stage)]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_rank_of_several_that_fails_alone_ends_at_once(capsys, stage, monkeypatch):
    from megatron_palimpsa.training import run as run_module

    def wrong(config):
        raise RuntimeError("this rank alone")

    def ended(code):
        raise SystemExit(code)

    monkeypatch.setattr(run_module, "train", wrong)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(os, "_exit", ended)
    with pytest.raises(SystemExit, match="1"):
        cli.main(["train", str(stage)])
    assert "RuntimeError: this rank alone" in capsys.readouterr().err
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    with pytest.raises(RuntimeError, match="this rank alone"):
        cli.main(["train", str(stage)])


def test_generate_needs_a_stage(capsys, tmp_path):
    assert "holds no stage" in refusal(capsys, "generate", tmp_path, "text")


def test_a_file_that_cannot_be_written_is_one_message(stage, tmp_path, capsys, monkeypatch):
    def full(self, config):
        raise OSError(errno.ENOSPC, "No space left on device", str(self.config))

    monkeypatch.setattr(RunFolder, "write_config", full)
    assert cli.main(["train", str(stage)]) == 1
    assert capsys.readouterr().err.startswith("megatron-palimpsa: error: [Errno 28] No space left on device: ")


def test_readers_that_go_away_leave_no_traceback(stage):
    command = f"{sys.executable} -m megatron_palimpsa train {stage} --dry-run | true"
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert answer.stderr == ""


def test_keeping_more_checkpoints_than_the_stage_has_needs_no_more_space(stage, capsys):
    assert cli.main(["train", str(stage), "checkpoint.keep=1000000000", "--dry-run"]) == 0


def test_the_recipe_is_what_is_missing(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train"])
    assert capsys.readouterr().err.endswith("the following arguments are required: RECIPE\n")


def test_progress_that_nobody_reads_fills_no_standard_error(capsys):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    cli._start_logging(Gone())
    logging.getLogger("megatron_palimpsa").info("step 1")
    assert capsys.readouterr().err == ""


def test_what_is_about_the_plan_is_refused_without_it(capsys, stage, tmp_path):
    for option in ("--ranks", "--gpu-memory"):
        assert "go with --dry-run" in refusal(capsys, "train", stage, option, "8")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_of_several_ranks_one_prints_the_plan(capsys, monkeypatch, stage, rank, lines):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["train", str(stage), "--dry-run"]) == 0
    assert capsys.readouterr().out.count("2 ranks: tp 1, pp 1, cp 1, dp 2") == lines


def test_of_the_ranks_of_a_machine_one_says_what_is_wrong(capsys, monkeypatch, stage):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    arguments = ["train", str(stage), "parallel.tp=3"]
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err == ""
    assert cli.main(arguments, at_end=lambda code: None) == 2
    assert "parallel.tp=3" in capsys.readouterr().err
    # The first rank of another machine.
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert cli.main(arguments) == 2
    assert "parallel.tp=3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "traceback"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:545] Connection closed by peer"), False),
        (torch.distributed.DistBackendError("NCCL error: remote process exited"), False),
        (RuntimeError("shapes do not match"), True),
    ],
)
def test_a_rank_that_lost_the_others_says_so_in_one_message(capsys, monkeypatch, stage, error, traceback):
    from megatron_palimpsa.training import run as training_run

    def fail(config):
        raise error

    ended = []
    monkeypatch.setattr(training_run, "train", fail)
    monkeypatch.setattr(cli, "_others_may_wait", lambda: True)
    monkeypatch.setattr("megatron_palimpsa.launcher.end_at_once", ended.append)
    assert cli.main(["train", str(stage)]) == 1
    assert ended == [1]
    err = capsys.readouterr().err
    assert str(error) in err
    assert ("Traceback" in err) == traceback
    assert ("rank 0 cannot reach the others" in err) != traceback


def test_an_output_without_a_character_gets_its_number(monkeypatch, tmp_path):
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr("megatron_palimpsa.report.build", lambda folder: print("1 ± 2"))
    assert cli.main(["report", str(tmp_path)]) == 0
    assert output.buffer.getvalue() == b"1 \\xb1 2\n"
