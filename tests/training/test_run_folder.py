"""The run folder: settings that may change under a run, the lock, the marker and the disk."""

import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest
from helpers.stages import tiny_stage

from megatron_palimpsa.config import ConfigError, load_stage
from megatron_palimpsa.training.run_folder import RunFolder

MARKER = {"steps": 3, "tokens": 96, "seconds": 1.5, "checkpoint": "checkpoints/step-3"}


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "runs" / "tiny")


@pytest.fixture
def started(folder):
    """A folder whose run has saved something."""
    (folder.checkpoints / "step-4").mkdir(parents=True)
    folder.write_config(tiny_stage())
    return folder


def test_written_configuration_reads_back(folder):
    folder.path.mkdir(parents=True)
    folder.write_config(tiny_stage(seed=7))
    assert load_stage(folder.config) == tiny_stage(seed=7)


def test_settings_that_change_the_weights_are_refused_by_name(started):
    with pytest.raises(ConfigError) as caught:
        started.check_config(tiny_stage(model={"norm_eps": 1e-6}, optimizer={"lr": 0.5}, seed=1))
    message = str(caught.value)
    for part in ("model.norm_eps=1e-06 (there 1e-05)", "optimizer.lr=0.5 (there 0.01)", "seed=1 (there 1234)"):
        assert part in message
    assert "train" not in message


@pytest.mark.parametrize(
    "change",
    [
        {"train": {"tokens": 1280}},
        {"train": {"precision": "bf16"}},
        {"train": {"global_batch_tokens": 128}},
        {"data": {"packing": "best-fit"}},
        {"init_from": {"stage": "before"}},
        {"optimizer": {"schedule": "linear"}},
    ],
)
def test_each_of_these_is_refused(started, change):
    with pytest.raises(ConfigError, match="holds a run with other settings"):
        started.check_config(tiny_stage(**change))


def test_layout_logging_and_stops_may_change(started):
    started.check_config(
        tiny_stage(
            world_size=2,
            parallel={"tp": 2},
            logging={"interval": 1},
            checkpoint={"interval": 3},
            train={"stop_at_step": 3, "micro_batch_size": 2, "recompute": "full", "max_bad_steps": 50},
            data={"train_blend": "elsewhere.yaml"},
        )
    )


def test_a_run_that_saved_nothing_binds_nobody(folder):
    folder.path.mkdir(parents=True)
    folder.write_config(tiny_stage())
    folder.check_config(tiny_stage(seed=1))


def test_a_finished_stage_binds_too(folder):
    folder.path.mkdir(parents=True)
    folder.write_config(tiny_stage())
    folder.write_marker(MARKER)
    with pytest.raises(ConfigError, match="seed=1"):
        folder.check_config(tiny_stage(seed=1))


def test_marker(folder):
    folder.path.mkdir(parents=True)
    assert folder.read_marker() is None
    folder.write_marker(MARKER)
    assert folder.read_marker() == MARKER
    assert [path.name for path in folder.path.iterdir()] == ["STAGE_COMPLETE"]


@pytest.mark.parametrize("content", [b"", b'{"steps"', b"{}", b"null", b"3", b'{"steps": 1}', b"\xff\xfe"])
def test_a_damaged_marker_is_neither_an_end_nor_a_crash(folder, content):
    folder.path.mkdir(parents=True)
    folder.marker.write_bytes(content)
    with pytest.raises(ConfigError, match=r"STAGE_COMPLETE: not readable .* remove it"):
        folder.read_marker()


def test_a_marker_that_is_a_folder_is_refused(folder):
    folder.marker.mkdir(parents=True)
    with pytest.raises(ConfigError, match="STAGE_COMPLETE: not readable"):
        folder.read_marker()


def test_a_place_where_nothing_can_be_written_is_refused(folder, tmp_path, monkeypatch):
    (tmp_path / "runs").write_text("a file")
    assert folder.read_marker() is None
    with pytest.raises(ConfigError, match="runs is not a folder"):
        folder.check_place(checkpoint_bytes=8, keep=2)
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    with pytest.raises(ConfigError, match="nothing can be written to"):
        RunFolder(tmp_path / "other").check_place(checkpoint_bytes=8, keep=2)


_HOLD = """
import sys, time
from pathlib import Path
from megatron_palimpsa.training.run_folder import RunFolder
with RunFolder(Path(sys.argv[1])).locked():
    print("held", flush=True)
    time.sleep(60)
"""


def test_two_processes_do_not_share_a_folder_and_a_killed_one_lets_go(folder):
    with subprocess.Popen([sys.executable, "-c", _HOLD, str(folder.path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"another process works in this folder .process {holder.pid} on"):
            folder.locked().__enter__()
        holder.kill()
    assert holder.returncode == -signal.SIGKILL
    with folder.locked():
        pass


def test_who_is_patient_gets_the_folder_when_the_other_ends(folder):
    with subprocess.Popen([sys.executable, "-c", _HOLD, str(folder.path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="another process"):
            folder.locked(patience=0.2).__enter__()
        killer = threading.Timer(0.3, holder.kill)
        killer.start()
        with folder.locked(patience=30):
            pass
        killer.join()


def test_disk_space_counts_what_is_still_to_be_written(folder, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 75, 25))
    folder.check_place(checkpoint_bytes=8, keep=2)
    with pytest.raises(ConfigError, match=r"no disk space .* 2.5e-08 GB are free, 2.7e-08 GB needed .*keep=2"):
        folder.check_place(checkpoint_bytes=9, keep=2)
    (folder.checkpoints / "step-4").mkdir(parents=True)
    folder.check_place(checkpoint_bytes=12, keep=2)
    (folder.checkpoints / "step-8").mkdir()
    (folder.checkpoints / "step-12").mkdir()
    with pytest.raises(ConfigError):
        folder.check_place(checkpoint_bytes=26, keep=2)
