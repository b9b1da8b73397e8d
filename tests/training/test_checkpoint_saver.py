"""Saving in the background: what is saved, when it counts, and what happens when it fails or is killed."""

import errno
import logging
import multiprocessing
import os
import shutil
import signal
import threading
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine_state import state_of
from helpers.single_process import single_process as single_process
from helpers.stages import random_batch, tiny_stage

from megatron_palimpsa.engine import optimizer_state
from megatron_palimpsa.engine.boxes import Box
from megatron_palimpsa.engine.megatron import MegatronEngine
from megatron_palimpsa.training import checkpoint, checkpoint_copy, checkpoint_saver
from megatron_palimpsa.training.checkpoint import Checkpointer, CheckpointError
from megatron_palimpsa.training.checkpoint_copy import HostCopy


def take(engine: MegatronEngine, first: int, steps: int = 1) -> None:
    batches = (random_batch(engine.config, seed) for seed in count(2 * first))
    for _ in range(steps):
        engine.train_step(batches, lambda loss, norm: True)


@pytest.fixture
def engine() -> MegatronEngine:
    engine = MegatronEngine(tiny_stage())
    take(engine, 0)
    return engine


class Gate:
    """Holds the writing threads until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._opened = threading.Event()
        write = checkpoint_saver.write_rank_file

        def held(*arguments: Any) -> Any:
            assert self._opened.wait(60)
            return write(*arguments)

        monkeypatch.setattr(checkpoint_saver, "write_rank_file", held)

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def write(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(checkpoint_saver, "write_rank_file", write)


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_saved_is_of_the_step_and_not_of_those_since(
    precision: str, distributed: bool, tmp_path: Path, gate: Gate
) -> None:
    engine = MegatronEngine(tiny_stage(train={"precision": precision}, parallel={"distributed_optimizer": distributed}))
    take(engine, 0, 2)
    background = Checkpointer(tmp_path / "background", engine, keep=2, background=True)
    progress: dict[str, Any] = {"list": [1]}
    background.save(2, {"list": [1]})
    before = state_of(engine)
    take(engine, 2, 2)
    changed = [key for key, value in state_of(engine).items() if not torch.equal(value, before[key])]
    assert len(changed) > len(before) / 2
    background.poll()
    assert background.saved_step is None
    gate.open()
    background.finish()
    assert background.saved_step == 2

    again = MegatronEngine(engine.config)
    take(again, 0, 2)
    path = checkpoint.save(tmp_path / "at once", 2, again, progress, keep=2)
    assert content(tmp_path / "background" / "step-2") == content(path)


def test_the_copys_memory_is_there_before_the_first_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[int] = []
    lock = HostCopy._lock

    def counted(self: HostCopy, size: int) -> None:
        locked.append(size)
        lock(self, size)

    monkeypatch.setattr(HostCopy, "_lock", counted)
    engine = MegatronEngine(tiny_stage())
    for background in (True, False):
        saver = Checkpointer(tmp_path / str(background), engine, keep=2, background=background)
        saver.reserve()
        assert len(locked) == 1
        # Moments are there after the first step only.
        take(engine, 0)
        saver.save(1, {})
        saver.finish()
        assert len(locked) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_copy_of_gpu_memory_is_page_locked_and_kept() -> None:
    copy = HostCopy()
    places = []
    for seed in range(2):
        value = torch.randn(1000, 300, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
        box = Box("weight", (1000, 300), (0, 0), (1000, 300))
        [(_, copied)] = copy.take([(box, value)])
        assert copied.is_pinned()
        assert torch.equal(copied, value.cpu())
        places.append(copied.data_ptr())
    assert places[0] == places[1]
    copy.release()
    copy.release()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_memory_of_a_copy_that_was_dropped_can_be_locked_again() -> None:
    value = torch.ones(100, device="cuda")
    box = Box("weight", (100,), (0,), (100,))
    kept = []
    for _ in range(50):
        HostCopy().take([(box, value)])
        kept.append(HostCopy())
        [(_, copied)] = kept[-1].take([(box, value)])
        assert copied.is_pinned()
    with pytest.raises(RuntimeError):
        checkpoint_copy._register(copied.data_ptr(), 64)
    assert torch.equal(torch.ones(3, device="cuda").cpu(), torch.ones(3))


def test_more_memory_than_there_is() -> None:
    with pytest.raises(MemoryError, match="GiB of host memory"):
        HostCopy()._lock(2**60)


def test_a_save_completes_the_one_before_it(engine: MegatronEngine, tmp_path: Path) -> None:
    saver = Checkpointer(tmp_path, engine, keep=2, background=True)
    for step in (1, 2, 3):
        saver.save(step, {})
        saver.save(step, {})
    assert saver.saved_step in (2, 3)
    saver.finish()
    assert saver.saved_step == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-2", "step-3"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-3"


def test_step_that_was_resumed_from_is_not_saved_again(engine: MegatronEngine, tmp_path: Path) -> None:
    Checkpointer(tmp_path, engine, keep=2, background=True, saved_step=1).save(1, {})
    assert list(tmp_path.iterdir()) == []


def test_the_log_says_how_long_it_took(engine: MegatronEngine, tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.INFO):
        checkpoint.save(tmp_path, 1, engine, {}, keep=2)
    assert "step-1: training stopped for 0." in caplog.text
    assert "GB written in 0." in caplog.text


ERRORS = {
    "full disk": (OSError(errno.ENOSPC, "No space left on device"), "no space left on the disk"),
    "memory": (MemoryError(), "MemoryError"),
    "thread ended": (SystemExit(3), "3"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_failed_write_is_told_at_the_next_boundary(
    name: str, engine: MegatronEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, message = ERRORS[name]
    saver = Checkpointer(tmp_path, engine, keep=2, background=True)
    saver.save(1, {})
    saver.finish()
    with monkeypatch.context() as patch:
        fail_with(patch, error)
        saver.save(2, {})
        saver._save.task.join()
        with pytest.raises(CheckpointError, match=r"step-2: could not be saved \(rank 0: .*" + message):
            saver.poll()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1"
    saver.poll()
    saver.save(3, {})
    saver.finish()
    assert checkpoint.latest(tmp_path) == tmp_path / "step-3"


def test_thread_that_died_without_a_word(engine: MegatronEngine, tmp_path: Path) -> None:
    saver = Checkpointer(tmp_path, engine, keep=2, background=True)
    saver.save(1, {})
    saver._save.task.join()
    saver._save.task._done = False
    with pytest.raises(CheckpointError, match="a writer died"):
        saver.finish()


def test_no_copy_in_memory_is_a_failed_save(
    engine: MegatronEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = Checkpointer(tmp_path, engine, keep=2, background=True)

    def reserve(size: int) -> None:
        raise RuntimeError(f"{size} bytes of host memory cannot be locked")

    monkeypatch.setattr(saver._copy, "_lock", reserve)
    saver.save(1, {})
    with pytest.raises(CheckpointError, match="cannot be locked"):
        saver.finish()


def test_too_little_space_is_found_before_anything_is_written(
    engine: MegatronEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sum(value.numel() * value.element_size() for _, value in engine.state_share())
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(0, 0, needed))
    with pytest.raises(CheckpointError, match=r"no space left on the disk: .* are free, .* needed"):
        Checkpointer(tmp_path, engine, keep=2, background=True).save(1, {})
    assert list(tmp_path.iterdir()) == []


def without_a_part(share: list[Any]) -> list[Any]:
    part = next(index for index, (box, _) in enumerate(share) if box.numel == 50)
    return [*share[:part], *share[part + 1 :]]


def twice(share: list[Any]) -> list[Any]:
    return share * 2


@pytest.mark.parametrize(("change", "message"), [(without_a_part, "wrote"), (twice, "two ranks wrote")])
def test_wrong_shares_are_never_published(
    change: Any, message: str, engine: MegatronEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_state, "MOST_ELEMENTS", 50)
    share = change(engine.state_share())
    monkeypatch.setattr(engine, "state_share", lambda: share)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.save(tmp_path, 1, engine, {}, keep=2)
    assert checkpoint.latest(tmp_path) is None


def test_large_tensors_are_cut(engine: MegatronEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = state_of(engine)
    monkeypatch.setattr(optimizer_state, "MOST_ELEMENTS", 50)
    assert max(box.numel for box, _ in engine.state_share()) == 50
    path = checkpoint.save(tmp_path, 1, engine, {}, keep=2)
    monkeypatch.setattr(optimizer_state, "MOST_ELEMENTS", 70)
    other = MegatronEngine(engine.config)
    checkpoint.load(path, other)
    found = state_of(other)
    assert all(torch.equal(value, found[key]) for key, value in expected.items())


@pytest.mark.parametrize("complete", [True, False])
def test_after_an_error_one_process_completes_what_it_writes(
    complete: bool, engine: MegatronEngine, tmp_path: Path, gate: Gate
) -> None:
    saver = Checkpointer(tmp_path, engine, keep=2, background=True)
    saver.save(1, {})
    gate.open()
    saver.leave(complete)
    assert (checkpoint.latest(tmp_path) == tmp_path / "step-1") is complete
    assert "checkpoint" not in [thread.name for thread in threading.enumerate()]


def die_before(call: int) -> None:
    """The process is killed before the `call`-th step that opens, flushes, renames or removes a file."""
    steps = count(1)

    def counted(function: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            if next(steps) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return step

    for owner, name in [(os, "fsync"), (os, "open"), *((Path, name) for name in ("replace", "rename", "open"))]:
        setattr(owner, name, counted(getattr(owner, name)))
    shutil.rmtree = counted(shutil.rmtree)


def save_and_die(folder: Path, engine: MegatronEngine, call: int) -> None:
    die_before(call)
    saver = Checkpointer(folder, engine, keep=2, background=True)
    saver.save(3, {"step": 3})
    saver.finish()
    os._exit(0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA does not survive a fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_killed_at_any_moment_the_old_or_the_new_checkpoint_is_complete(engine: MegatronEngine, tmp_path: Path) -> None:
    folder, found = tmp_path / "checkpoints", []
    for step in (1, 2):
        checkpoint.save(folder, step, engine, {"step": step}, keep=2)
    for call in count(1):
        copy = tmp_path / str(call)
        shutil.copytree(folder, copy)
        child = multiprocessing.get_context("fork").Process(target=save_and_die, args=(copy, engine, call))
        child.start()
        child.join(60)
        path = checkpoint.latest(copy)
        found.append(path.name)
        assert checkpoint.read_progress(path) == {"step": int(path.name.removeprefix("step-"))}
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
        shutil.rmtree(copy)
    # The old one first, from some moment on the new one.
    assert found == sorted(found)
    assert set(found) == {"step-2", "step-3"}
    assert 15 < len(found) < 60
