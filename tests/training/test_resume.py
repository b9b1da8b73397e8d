"""A run that was cut anywhere ends with the weights, moments and records of an unbroken one."""

import signal

import pytest
import torch
from helpers.runs import read_checkpoint, train_in_new_process, write_stage

from megatron_palimpsa.training.exit_codes import ExitCode
from megatron_palimpsa.training.metrics import read_records
from megatron_palimpsa.training.run_folder import RunFolder

TIMING = ("seconds", "tokens_per_second", "peak_memory_bytes")


@pytest.fixture(scope="module")
def stages(tmp_path_factory, tiny_data):
    """A finished first stage and a folder that stages of the second kind are started from."""
    folder = tmp_path_factory.mktemp("stages")
    first = write_stage(folder, tiny_data, "first", train={"tokens": 4 * 64})
    assert train_in_new_process(first) == ExitCode.COMPLETE
    return folder


@pytest.fixture
def second(stages, tiny_data):
    def write(name, **changes):
        settings = {"init_from": {"stage": "first"}, "logging": {"interval": 1, "tensorboard": True}, **changes}
        return write_stage(stages, tiny_data, name, **settings)

    return write


@pytest.fixture(scope="module")
def unbroken(stages, tiny_data):
    path = write_stage(stages, tiny_data, "unbroken", init_from={"stage": "first"})
    assert train_in_new_process(path) == ExitCode.COMPLETE
    return RunFolder(stages / "runs" / "unbroken")


def tensors(folder, tmp_path, step=8):
    return read_checkpoint(folder.checkpoints / f"step-{step}", tmp_path)


def assert_same_end(folder, reference, tmp_path):
    ours, theirs = tensors(folder, tmp_path), tensors(reference, tmp_path)
    assert ours.keys() == theirs.keys()
    assert any(name.startswith("optimizer.") for name in ours)
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert different == []
    assert untimed(folder) == untimed(reference)


def untimed(folder):
    records = [record for record in read_records(folder.metrics) if record["kind"] != "resume"]
    return [{key: value for key, value in record.items() if key not in TIMING} for record in records]


def resumes(folder):
    return [record["step"] for record in read_records(folder.metrics) if record["kind"] == "resume"]


@pytest.mark.parametrize(
    ("kills", "resumed_from"),
    [([6], [4]), ([5, 7], [4, 4]), ([2, 6], [4]), ([7, 8], [4, 4])],
    ids=["once", "twice", "before the first checkpoint too", "in the last step too"],
)
def test_sigkill_off_a_checkpoint_step(stages, second, unbroken, tmp_path, kills, resumed_from):
    path = second("killed-" + "-".join(map(str, kills)))
    folder = RunFolder(stages / "runs" / path.stem)
    for step in kills:
        assert train_in_new_process(path, signals={step: signal.SIGKILL}) == -signal.SIGKILL
        assert read_records(folder.metrics)[-1]["step"] == step - 1
        assert not folder.marker.exists()
    assert train_in_new_process(path) == ExitCode.COMPLETE
    assert resumes(folder) == resumed_from
    assert_same_end(folder, unbroken, tmp_path)


def test_sigkill_while_checkpoints_are_written_in_the_background(stages, second, unbroken, tmp_path):
    path = second("background", checkpoint={"interval": 1, "async_save": True})
    folder = RunFolder(stages / "runs" / "background")
    for step in (3, 5, 8):
        assert train_in_new_process(path, signals={step: signal.SIGKILL}) == -signal.SIGKILL
    assert train_in_new_process(path) == ExitCode.COMPLETE
    # A save is published at the latest before the one after the next begins.
    for killed, resumed in zip((3, 5, 8), resumes(folder)[-3:], strict=True):
        assert killed - 2 <= resumed < killed
    assert_same_end(folder, unbroken, tmp_path)


def test_killed_between_the_last_checkpoint_and_the_marker(stages, second, unbroken, tmp_path):
    path = second("unmarked")
    assert train_in_new_process(path) == ExitCode.COMPLETE
    folder = RunFolder(stages / "runs" / "unmarked")
    folder.marker.unlink()
    assert train_in_new_process(path) == ExitCode.COMPLETE
    assert folder.marker.exists()
    assert resumes(folder) == [8]
    assert_same_end(folder, unbroken, tmp_path)


def test_learning_rate_around_the_resume(stages, second, unbroken):
    path = second("rates")
    assert train_in_new_process(path, signals={6: signal.SIGKILL}) == -signal.SIGKILL
    assert train_in_new_process(path) == ExitCode.COMPLETE
    rates = [
        {record["step"]: record["lr"] for record in untimed(folder) if record["kind"] == "train"}
        for folder in (RunFolder(stages / "runs" / "rates"), unbroken)
    ]
    assert [rates[0][step] for step in (4, 5, 6)] == [rates[1][step] for step in (4, 5, 6)]
    assert rates[0][4] > rates[0][5] > rates[0][6]


def test_log_interval_across_a_resume_averages_the_same_losses(stages, second, tmp_path):
    paths = [second(name, logging={"interval": 3, "tensorboard": False}) for name in ("whole", "cut")]
    assert train_in_new_process(paths[0]) == ExitCode.COMPLETE
    assert train_in_new_process(paths[1], signals={5: signal.SIGKILL}) == -signal.SIGKILL
    assert train_in_new_process(paths[1]) == ExitCode.COMPLETE
    whole, cut = (RunFolder(stages / "runs" / path.stem) for path in paths)
    assert [record["step"] for record in untimed(cut) if record["kind"] == "train"] == [3, 6, 8]
    assert untimed(whole) == untimed(cut)


def test_damaged_checkpoint_falls_back_to_the_one_before(stages, second, unbroken, tmp_path):
    path = second("damaged", checkpoint={"interval": 2})
    assert train_in_new_process(path, signals={7: signal.SIGKILL}) == -signal.SIGKILL
    folder = RunFolder(stages / "runs" / "damaged")
    (shard,) = (folder.checkpoints / "step-6").glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert train_in_new_process(path, output=tmp_path / "output") == ExitCode.COMPLETE
    (warning,) = [line for line in (tmp_path / "output").read_text().splitlines() if "WARNING" in line]
    assert "step-6 is damaged" in warning
    assert resumes(folder) == [4]
    assert_same_end(folder, unbroken, tmp_path)


def test_no_intact_checkpoint_is_an_error_and_not_a_new_start(stages, second, tmp_path):
    path = second("hopeless")
    assert train_in_new_process(path, "train.stop_at_step=4") == ExitCode.SAVED_AND_STOPPED
    (stages / "runs" / "hopeless" / "checkpoints" / "step-4" / "COMPLETE").unlink()
    assert train_in_new_process(path, output=tmp_path / "output") == ExitCode.WRONG_INPUT
    assert "no checkpoint is intact" in (tmp_path / "output").read_text()


def test_other_data_under_a_checkpoint_is_refused(second, tiny_data, tmp_path):
    path = second("moved")
    assert train_in_new_process(path, "train.stop_at_step=2") == ExitCode.SAVED_AND_STOPPED
    other = f"data.train_blend={tiny_data / 'valid.yaml'}"
    assert train_in_new_process(path, other, output=tmp_path / "output") == ExitCode.WRONG_INPUT
    message = (tmp_path / "output").read_text()
    assert "data.train_blend=" in message
    assert "was trained on other data (1 valid, there 1 train)" in message
    assert "restore the blend" in message
    assert "init_from.stage='moved'" in message
