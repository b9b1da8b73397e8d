"""What a run does between its first step and its exit code, on the real engine."""

import errno
import json
import shutil
import signal

import pytest
import torch
from helpers.runs import Events, read_checkpoint, train_in_new_process, train_on_ranks, write_stage

from megatron_palimpsa import cli
from megatron_palimpsa.config import load_stage
from megatron_palimpsa.training import checkpoint, checkpoint_saver, loop
from megatron_palimpsa.training.exit_codes import ExitCode
from megatron_palimpsa.training.metrics import read_records
from megatron_palimpsa.training.run_folder import RunFolder


@pytest.fixture(scope="module")
def first(tmp_path_factory, tiny_data):
    """A finished stage that was stopped once."""
    folder = tmp_path_factory.mktemp("first")
    path = write_stage(folder, tiny_data, "first", logging={"interval": 2, "tensorboard": True})
    assert train_in_new_process(path, "train.stop_at_step=5") == ExitCode.SAVED_AND_STOPPED
    assert train_in_new_process(path) == ExitCode.COMPLETE
    return RunFolder(folder / "runs" / "first")


def state(folder, step):
    return json.loads((folder.checkpoints / f"step-{step}" / "state.json").read_text())


def steps_saved(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in folder.checkpoints.glob("step-*"))


def test_records_and_their_keys(first):
    records = read_records(first.metrics)
    assert [(record["kind"], record["step"]) for record in records] == [
        ("valid", 0),
        ("train", 2),
        ("train", 4),
        ("valid", 4),
        ("resume", 5),
        ("train", 6),
        ("train", 8),
        ("valid", 8),
        ("end", 8),
    ]
    keys = {record["kind"]: set(record) - {"kind", "step"} for record in records}
    assert keys == {
        "train": {"tokens", "loss", "lr", "grad_norm", "tokens_per_second", "seconds", "skipped_steps"},
        "valid": {"tokens", "loss", "position_edges", "loss_by_position", "memory"},
        "resume": set(),
        "end": {"tokens", "seconds", "peak_memory_bytes"},
    }
    valid = records[0]
    assert valid["position_edges"] == [0, 16, 32]
    assert set(valid["memory"]) == {"1", "2"}
    assert set(valid["memory"]["1"]) == {"window"}
    assert set(valid["memory"]["2"]) == {"window", "importance_ratio"}
    assert records[-1]["tokens"] == 512
    seconds = [record["seconds"] for record in records if "seconds" in record]
    assert seconds == sorted(seconds)


def test_marker_sums_the_stage_up(first):
    marker = first.read_marker()
    valid = [record["loss"] for record in read_records(first.metrics) if record["kind"] == "valid"]
    assert (marker["steps"], marker["tokens"], marker["skipped_steps"]) == (8, 512, 0)
    assert (marker["valid_loss_before"], marker["valid_loss_after"]) == (valid[0], valid[-1])
    assert valid[-1] < valid[0]
    assert (first.path / marker["checkpoint"] / "COMPLETE").exists()
    assert marker["peak_memory_bytes"] > 10**6


def test_old_checkpoints_are_pruned(first):
    assert steps_saved(first) == [5, 8]


def test_tensorboard_has_a_file_for_each_process(first):
    assert len(list(first.tensorboard.iterdir())) == 2


def test_one_wandb_run_over_a_resume(tmp_path, tiny_data, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    path = write_stage(tmp_path, tiny_data, logging={"wandb_project": "tiny"})
    for step in (1, 2):
        assert train_in_new_process(path, f"train.stop_at_step={step}") == ExitCode.SAVED_AND_STOPPED
    runs = list((tmp_path / "runs" / "stage" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert runs
    assert len({path.name for path in runs}) == 1


def modified(folder):
    return {path: path.stat().st_mtime_ns for path in folder.path.rglob("*") if path.is_file()}


def test_complete_stage_says_so_and_touches_nothing(first, tmp_path):
    before = modified(first)
    assert train_in_new_process(first.config, output=tmp_path / "output") == ExitCode.COMPLETE
    assert "Stage first is complete already: 8 steps, 512 tokens" in (tmp_path / "output").read_text()
    assert modified(first) == before


@pytest.mark.parametrize(
    ("override", "signals", "step"),
    [
        ("seed=1234", {3: signal.SIGTERM}, 3),
        ("seed=1234", {3: signal.SIGUSR1}, 3),
        ("train.stop_at_step=3", {}, 3),
        ("train.stop_at_tokens=129", {}, 3),
        ("train.stop_after_minutes=0.00001", {}, 0),
    ],
)
def test_asked_to_stop_it_saves_and_exits_75(tmp_path, tiny_data, override, signals, step):
    path = write_stage(tmp_path, tiny_data)
    folder = RunFolder(tmp_path / "runs" / "stage")
    assert train_in_new_process(path, override, signals=signals) == ExitCode.SAVED_AND_STOPPED
    assert steps_saved(folder) == [step]
    assert not folder.marker.exists()
    # Nothing tells it to stop again: it goes on from there to the end.
    assert train_in_new_process(path, "train.tokens=512") == ExitCode.COMPLETE
    assert [record["step"] for record in read_records(folder.metrics) if record["kind"] == "resume"] == [step]
    assert [record["step"] for record in read_records(folder.metrics) if record["kind"] == "train"] == [*range(1, 9)]


def test_stop_already_reached_stops_at_once(tmp_path, tiny_data):
    path = write_stage(tmp_path, tiny_data)
    folder = RunFolder(tmp_path / "runs" / "stage")
    for _ in range(2):
        assert train_in_new_process(path, "train.stop_at_step=2") == ExitCode.SAVED_AND_STOPPED
    assert steps_saved(folder) == [2]


@pytest.mark.parametrize("layout", [{"tp": 2}, {"distributed_optimizer": True}], ids=["tp2", "dp2"])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path, tiny_data, layout):
    path = write_stage(tmp_path, tiny_data, parallel=layout)
    codes = train_on_ranks(path, ranks=[Events(), Events(signals={3: signal.SIGTERM})])
    assert codes == [ExitCode.SAVED_AND_STOPPED] * 2
    folder = RunFolder(tmp_path / "runs" / "stage")
    assert steps_saved(folder) == [3]
    assert train_on_ranks(path, ranks=[Events(), Events()]) == [ExitCode.COMPLETE] * 2


def test_poisoned_step_changes_nothing_and_is_counted(tmp_path, tiny_data):
    clean = write_stage(tmp_path, tiny_data, "clean")
    poisoned = write_stage(tmp_path, tiny_data, "poisoned")
    assert train_in_new_process(clean, "train.stop_at_step=2") == ExitCode.SAVED_AND_STOPPED
    output = tmp_path / "output"
    assert train_in_new_process(poisoned, "train.stop_at_step=3", poison=(3,), output=output) == 75
    folders = {name: RunFolder(tmp_path / "runs" / name) for name in ("clean", "poisoned")}
    before = read_checkpoint(folders["clean"].checkpoints / "step-2", tmp_path)
    after = read_checkpoint(folders["poisoned"].checkpoints / "step-3", tmp_path)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert state(folders["poisoned"], 3)["optimizer_steps"] == 2
    assert "WARNING: step 3 skipped: gradient norm nan" in output.read_text()
    assert train_in_new_process(poisoned) == ExitCode.COMPLETE
    skipped = {
        record["step"]: record["skipped_steps"]
        for record in read_records(folders["poisoned"].metrics)
        if record["kind"] == "train"
    }
    assert (skipped[2], skipped[3], skipped[8]) == (0, 1, 1)
    assert folders["poisoned"].read_marker()["skipped_steps"] == 1


def test_too_many_bad_steps_stop_with_3_and_save_nothing(tmp_path, tiny_data):
    path = write_stage(tmp_path, tiny_data)
    folder = RunFolder(tmp_path / "runs" / "stage")
    output = tmp_path / "output"
    bad = {"poison": (6, 7, 8), "output": output}
    assert train_in_new_process(path, "train.max_bad_steps=2", **bad) == ExitCode.NUMERICAL_STOP
    assert "2 steps in a row were skipped" in output.read_text()
    assert "go on from: step 4" in output.read_text()
    assert steps_saved(folder) == [4]
    assert not folder.marker.exists()
    assert train_in_new_process(path) == ExitCode.COMPLETE


def test_weights_gone_bad_never_complete_and_never_push_out_good_checkpoints(tmp_path, tiny_data):
    path = write_stage(tmp_path, tiny_data, checkpoint={"interval": 2}, model={"train_prior": True})
    folder = RunFolder(tmp_path / "runs" / "stage")
    output = tmp_path / "output"
    # The step after the checkpoint of step 2 breaks the weights; all later ones are refused.
    assert train_in_new_process(path, ruin=3, output=output) == ExitCode.NUMERICAL_STOP
    assert steps_saved(folder) == [2]
    assert not folder.marker.exists()
    assert "the validation loss is nan; stopping at step 4. Checkpoint to go on from: step 2" in output.read_text()
    assert train_in_new_process(path) == ExitCode.COMPLETE


def test_a_checkpoint_that_falls_on_a_refused_step_is_made_up_for(tmp_path, tiny_data):
    path = write_stage(tmp_path, tiny_data)
    assert train_in_new_process(path, poison=(4,)) == ExitCode.COMPLETE
    assert steps_saved(RunFolder(tmp_path / "runs" / "stage")) == [5, 8]


def test_a_checkpoint_asked_for_is_saved_and_the_run_goes_on(tmp_path, tiny_data):
    path = write_stage(tmp_path, tiny_data)
    folder = RunFolder(tmp_path / "runs" / "stage")
    folder.path.mkdir(parents=True)
    folder.save_now.touch()
    assert train_in_new_process(path, "checkpoint.interval=100") == ExitCode.COMPLETE
    assert steps_saved(folder) == [1, 8]
    assert not folder.save_now.exists()


@pytest.mark.parametrize("load", ["weights", "weights+optimizer"])
def test_next_stage_takes_the_weights_and_begins_anew(tmp_path, tiny_data, first, load):
    path = write_stage(
        tmp_path,
        tiny_data,
        "second",
        init_from={"stage": str(first.path), "load": load},
        optimizer={"lr": 2e-3, "warmup_steps": 4},
    )
    assert train_in_new_process(path, "train.stop_after_minutes=0.00001") == ExitCode.SAVED_AND_STOPPED
    folder = RunFolder(tmp_path / "runs" / "second")
    start = read_checkpoint(folder.checkpoints / "step-0", tmp_path)
    end = read_checkpoint(first.checkpoints / "step-8", tmp_path)
    moments = {name for name in start if name.startswith("optimizer.")}
    weights = {name for name in start if not name.startswith(("optimizer.", "rng."))}
    assert len(moments) > len(weights) > 20
    assert all(torch.equal(start[name], end[name]) for name in weights)
    if load == "weights":
        assert not any(start[name].any() for name in moments)
    else:
        assert all(torch.equal(start[name], end[name]) for name in moments)
        assert any(start[name].any() for name in moments)
    assert state(folder, 0)["optimizer_steps"] == (0 if load == "weights" else 8)
    progress = state(folder, 0)["progress"]
    assert (progress["step"], progress["consumed_sequences"], progress["tokens"]) == (0, 0, 0)
    assert progress["first_valid_loss"] == pytest.approx(first.read_marker()["valid_loss_after"], rel=1e-6)
    assert train_in_new_process(path, "train.stop_at_step=2") == ExitCode.SAVED_AND_STOPPED
    rates = [record["lr"] for record in read_records(folder.metrics) if record["kind"] == "train"]
    assert rates == [0.0005, 0.001]


def test_damaged_last_checkpoint_of_the_stage_before_is_refused(tmp_path, tiny_data, first):
    copy = tmp_path / "copy"
    shutil.copytree(first.path, copy)
    (copy / "checkpoints" / "step-8" / "COMPLETE").write_text("")
    path = write_stage(tmp_path, tiny_data, init_from={"stage": str(copy)})
    assert train_in_new_process(path, output=tmp_path / "output") == ExitCode.WRONG_INPUT
    assert "step-8 of that stage is damaged" in (tmp_path / "output").read_text()


def test_second_process_is_refused(tmp_path, tiny_data):
    path = write_stage(tmp_path, tiny_data)
    with RunFolder(tmp_path / "runs" / "stage").locked():
        assert train_in_new_process(path, output=tmp_path / "output") == ExitCode.WRONG_INPUT
    assert "another process works in this folder" in (tmp_path / "output").read_text()


@pytest.mark.parametrize("background", ["true", "false"])
def test_a_checkpoint_that_cannot_be_written_ends_with_a_clear_error(
    tmp_path, tiny_data, monkeypatch, capsys, background
):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_saver, "write_rank_file", full)
    path = write_stage(tmp_path, tiny_data)
    assert cli.main(["train", str(path), f"checkpoint.async_save={background}"]) == ExitCode.FAILED
    last = capsys.readouterr().err.splitlines()[-1]
    assert "ERROR: " in last
    assert "step-4: could not be saved (rank 0: no space left on the disk: No space left on device)" in last
    assert steps_saved(RunFolder(tmp_path / "runs" / "stage")) == []


@pytest.mark.parametrize(
    ("error", "rank", "said"),
    [(checkpoint.SaveError, 0, True), (checkpoint.SaveError, 1, False), (checkpoint.CheckpointError, 1, True)],
)
def test_what_all_ranks_know_of_a_checkpoint_one_says(tmp_path, tiny_data, monkeypatch, caplog, error, rank, said):
    def fail(*arguments):
        raise error("step-2: could not be saved")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(loop.parallel, "initialize", fail)
    config = load_stage(write_stage(tmp_path, tiny_data))
    assert loop.train_stage(config, RunFolder(tmp_path), None, None, None) == ExitCode.FAILED
    assert ("could not be saved" in caplog.text) == said
