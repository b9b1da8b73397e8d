"""Jobs: every shard once, whoever works on them and whatever was there; one message for what cannot be."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import tokenizers as hf
from helpers import slow_sources
from helpers.bpe import write_tokenizer
from helpers.jobs import content, fineweb_job, read_examples, write_inputs
from palimpsa_data import DataError
from palimpsa_data.documents import Document
from palimpsa_data.jobs import run_job
from palimpsa_data.locks import lock
from palimpsa_data.pipeline import Limits
from palimpsa_data.plan import PrepJob, read_plan
from palimpsa_data.progress import Progress
from palimpsa_data.shards import check_shard, read_index
from palimpsa_data.sources import FineWebOptions, Input

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def test_every_input_becomes_a_shard(tmp_path: Path) -> None:
    seen: list[Progress] = []
    result = run_job(fineweb_job(tmp_path), progress=seen.append)
    names = ["out-00000-of-00002", "out-00001-of-00002"]
    assert [stem.name for stem in result.shards] == names
    assert result.written == 2
    reference = hf.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    reference.encode_special_tokens = True
    for name, source in zip(names, sorted((tmp_path / "in").iterdir()), strict=True):
        index = read_index(tmp_path / "out" / f"{name}.idx")
        tokens = np.fromfile(tmp_path / "out" / f"{name}.bin", index.dtype)
        rows = [text for text in pq.read_table(source)["text"].to_pylist() if text and text.strip()]
        expected = [[*reference.encode(text, add_special_tokens=False).ids, 0] for text in rows]
        assert np.split(tokens, index.starts[1:])[3].tolist() == expected[3]
        assert tokens.tolist() == [i for ids in expected for i in ids]
        manifest = check_shard(tmp_path / "out" / name, checksums=True)
        assert manifest.spec.input_name.endswith(source.name)
        assert manifest.spec.input_bytes == source.stat().st_size
        assert sum(manifest.skipped.values()) == len(pq.read_table(source)) - len(rows)
        assert sum(documents for documents, _ in manifest.sources.values()) == len(rows)
    last = seen[-1]
    assert (last.shards, last.total_shards) == (2, 2)
    assert last.input_bytes == last.total_bytes == sum(path.stat().st_size for path in (tmp_path / "in").iterdir())
    assert last.tokens == sum(manifest.tokens for manifest in result.shards.values())
    assert last.seconds_left == 0
    assert "left 0:00:00" in last.line()


def test_several_processes_and_tasks_write_the_same(tmp_path: Path) -> None:
    write_inputs(tmp_path / "in", files=5)
    run_job(fineweb_job(tmp_path, "one/set"))
    expected = content(tmp_path / "one/set")
    result = run_job(fineweb_job(tmp_path, "two/set"), processes=2)
    assert (len(result.shards), result.written) == (5, 5)
    assert content(tmp_path / "two/set") == expected
    job = fineweb_job(tmp_path, "tasks/set")
    parts = [run_job(job, shard=(task, 3)) for task in range(3)]
    assert [[int(stem.name[4:9]) for stem in part.shards] for part in parts] == [[0, 3], [1, 4], [2]]
    assert content(tmp_path / "tasks/set") == expected
    many = fineweb_job(tmp_path, "many/set")
    assert [run_job(many, shard=(task, 7)).written for task in range(7)] == [1, 1, 1, 1, 1, 0, 0]
    with pytest.raises(DataError, match=r"--shard 3/3: i/n needs 0 <= i < n"):
        run_job(job, shard=(3, 3))


def test_a_second_call_only_verifies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = fineweb_job(tmp_path)
    first = run_job(job)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    hashed = []
    monkeypatch.setattr(Input, "sha256", lambda self: hashed.append(self) or "x")
    seen: list[Progress] = []
    second = run_job(job, progress=seen.append)
    assert (second.written, second.shards) == (0, first.shards)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == times
    assert not hashed
    assert (seen[-1].total_bytes, seen[-1].tokens) == (0, 0)


def test_another_job_in_the_folder_is_refused(tmp_path: Path) -> None:
    job = fineweb_job(tmp_path)
    run_job(job)
    before = content(tmp_path / "out")
    changes: dict[str, dict[str, Any]] = {
        r"options\.min_score None there, 2\.0 here": {"options": FineWebOptions(min_score=2.0)},
        r"limits\.min_tokens 1 there, 5 here": {"limits": Limits(min_tokens=5)},
        r"2 inputs there, 1 here, differing in .*train-00000": {"inputs": job.inputs[1:]},
        "another tokenizer": {"tokenizer": write_tokenizer(tmp_path / "other", 310)},
        "kind 'fineweb' there, 'text' here": {"kind": "text"},
        "loss_mask False there, True here": {"loss_mask": True},
    }
    for message, change in changes.items():
        with pytest.raises(DataError, match=f"holds another job: {message}.*another --output"):
            run_job(dataclasses.replace(job, **change))
    run_job(dataclasses.replace(job, options=FineWebOptions(strict=False), backend="huggingface"))
    assert content(tmp_path / "out") == before


def test_an_input_of_other_content_is_prepared_again(tmp_path: Path) -> None:
    job = fineweb_job(tmp_path)
    run_job(job)
    path = job.inputs[0].path
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(b"CC-MAIN")] ^= 1  # of the same size
    path.write_bytes(damaged)
    assert run_job(job).written == 1


def test_half_written_plans_and_records_are_no_obstacle(tmp_path: Path) -> None:
    job = fineweb_job(tmp_path)
    run_job(job)
    before = content(tmp_path / "out")
    (tmp_path / "out/out-00000-of-00002.input.json").write_bytes(b'{"name"')
    assert run_job(job).written == 0
    assert content(tmp_path / "out") == before
    (tmp_path / "out/job.json").write_bytes(b'{"format": 1}')
    with pytest.raises(DataError, match=r"job\.json: not a job .* prepare the data again"):
        run_job(job)
    (tmp_path / "out/job.json").write_bytes(b'{"format": 0}')
    with pytest.raises(DataError, match=r"format 0, this version reads 1"):
        read_plan(tmp_path / "out")
    with pytest.raises(DataError, match="no job was started in this folder"):
        read_plan(tmp_path)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_broken_input_does_not_stop_the_others(tmp_path: Path, processes: int) -> None:
    write_inputs(tmp_path / "in", files=3)
    broken = tmp_path / "in/train-00001.parquet"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:-100])
    job = fineweb_job(tmp_path)
    with pytest.raises(DataError, match=r"1 of 3 shards could not be prepared; the others are done:\n.*train-00001"):
        run_job(job, processes=processes)
    assert len(list((tmp_path / "out").glob("*.manifest.json"))) == 2
    assert not list((tmp_path / "out").glob("*.tmp"))
    broken.write_bytes(whole)  # fetched again, and of another size
    assert run_job(fineweb_job(tmp_path), processes=processes).written == 1
    assert len(list((tmp_path / "out").glob("*.manifest.json"))) == 3


def test_another_file_does_not_replace_a_shard_unasked(tmp_path: Path) -> None:
    write_inputs(tmp_path / "in", files=3)
    run_job(fineweb_job(tmp_path))
    before = content(tmp_path / "out")
    write_inputs(tmp_path / "in", files=2, rows=7)
    manifest = r"out-0000{}-of-00003.manifest.json is of another in/train-0000{}.parquet than that is now"
    with pytest.raises(DataError, match=manifest.format(0, 0) + r" \(so are 1 more\): .* or remove the manifest"):
        run_job(fineweb_job(tmp_path))
    assert content(tmp_path / "out") == before
    (tmp_path / "out/out-00000-of-00003.manifest.json").unlink()
    with pytest.raises(DataError, match=manifest.format(1, 1) + ": choose"):
        run_job(fineweb_job(tmp_path))
    (tmp_path / "out/out-00001-of-00003.manifest.json").unlink()
    assert run_job(fineweb_job(tmp_path)).written == 2


def test_nothing_to_prepare(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing to prepare"):
        run_job(dataclasses.replace(fineweb_job(tmp_path), inputs=[]))


def test_inputs_in_the_output_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    """The second call would find the first one's files among its inputs, and be another job."""
    job = fineweb_job(tmp_path)
    for output in (tmp_path / "in", tmp_path):
        before = content(tmp_path / "in")
        with pytest.raises(DataError, match=r"\.parquet: an input cannot lie in --output .* choose another --output"):
            run_job(dataclasses.replace(job, output=output))
        assert content(tmp_path / "in") == before
        assert not (tmp_path / "job.json").exists()


def test_an_output_that_no_record_could_hold_is_refused(tmp_path: Path) -> None:
    output = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    with pytest.raises(DataError, match=r"caf\\xe9': the name is not UTF-8; choose another"):
        run_job(dataclasses.replace(fineweb_job(tmp_path), output=output))


def test_an_output_that_cannot_be_a_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(DataError, match=r"cannot write into .*file.*; make space, change rights or choose another"):
            run_job(dataclasses.replace(fineweb_job(tmp_path), output=output))


def test_examples_have_a_loss_mask(tmp_path: Path) -> None:
    result = run_job(fineweb_job(tmp_path, read=read_examples, loss_mask=True, options=FineWebOptions()))
    for stem, manifest in result.shards.items():
        assert check_shard(stem, checksums=True) == manifest
        assert (manifest.documents, manifest.damaged) == (39, 1)
        assert manifest.trained_tokens < manifest.tokens


def read_error(source: Any, options: Any, progress: Callable[[int], None]) -> Iterator[Document]:
    yield Document("one")
    raise OSError(5, "Input/output error")


def bug(source: Any, options: Any, progress: Callable[[int], None]) -> Iterator[Document]:
    yield Document("one")
    raise KeyError("a bug")


def test_an_input_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*train-00000\.parquet: Input/output error"):
        run_job(fineweb_job(tmp_path, read=read_error))
    with pytest.raises(KeyError):
        run_job(fineweb_job(tmp_path, read=bug))
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_too_little_disk_is_said_before_anything_is_written(tmp_path: Path) -> None:
    job = fineweb_job(tmp_path)
    huge = [dataclasses.replace(entry, bytes=2**60) for entry in job.inputs if isinstance(entry, Input)]
    with pytest.raises(DataError, match="not enough disk space"):
        run_job(dataclasses.replace(job, inputs=huge))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["job.json"]


def full_disk(job: PrepJob, processes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    with pytest.raises(DataError, match=r"cannot write shard .* stays unfinished: make space"):
        run_job(job, processes=processes)


@pytest.mark.parametrize("processes", [1, 2])
def test_disk_full_in_the_middle_goes_on_after_space_is_made(tmp_path: Path, processes: int) -> None:
    write_inputs(tmp_path / "in", rows=200)
    run_job(fineweb_job(tmp_path, "expected/set"))
    job = fineweb_job(tmp_path, "now/set")
    child = multiprocessing.get_context("fork").Process(target=full_disk, args=(job, processes))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert not [path for path in (tmp_path / "now/set").iterdir() if path.suffix in (".bin", ".idx", ".tmp", ".lock")]
    run_job(job)
    assert content(tmp_path / "now/set") == content(tmp_path / "expected/set")


def test_a_shard_another_process_works_on_is_waited_for_at_the_end(tmp_path: Path) -> None:
    job = fineweb_job(tmp_path)
    (tmp_path / "out").mkdir()
    said: list[str] = []
    with lock(tmp_path / "out/out-00000-of-00002.lock", wait=False):
        thread = threading.Thread(target=lambda: said.append(str(run_job(job, say=said.append).written)))
        thread.start()
        other = tmp_path / "out/out-00001-of-00002.manifest.json"
        for _ in range(400):
            if other.exists() and said:
                break
            time.sleep(0.05)
        assert other.exists()
        assert thread.is_alive()
    thread.join(30)
    assert said[0].startswith("out-00000-of-00002.lock is held by")
    assert said[1:] == ["2"]


def run_and_count(job: PrepJob, results: Any) -> None:
    results.put(run_job(job).written)


def test_two_calls_share_one_job(tmp_path: Path) -> None:
    write_inputs(tmp_path / "in", files=6)
    run_job(fineweb_job(tmp_path, "expected/set"))
    job = fineweb_job(tmp_path, "now/set")
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    calls = [context.Process(target=run_and_count, args=(job, results)) for _ in range(3)]
    for call in calls:
        call.start()
    written = [results.get(timeout=240) for _ in calls]
    for call in calls:
        call.join(60)
    assert sum(written) == 6
    assert content(tmp_path / "now/set") == content(tmp_path / "expected/set")


def test_a_killed_worker_is_one_failed_shard(tmp_path: Path) -> None:
    write_inputs(tmp_path / "in", files=3)
    job = fineweb_job(tmp_path, read=slow_sources.dies)
    with pytest.raises(
        DataError, match=r"1 of 3 shards .*\n.*train-00001\.parquet: the process that prepared it ended: killed"
    ):
        run_job(job, processes=2)
    assert len(list((tmp_path / "out").glob("*.manifest.json"))) == 2
    assert run_job(dataclasses.replace(job, read=slow_sources.quickly)).written == 1


def run_slowly(job: PrepJob) -> None:
    run_job(job, processes=2)


def test_workers_do_not_outlive_the_job(tmp_path: Path) -> None:
    job = fineweb_job(tmp_path, read=slow_sources.slowly, options=slow_sources.SlowOptions(str(tmp_path)))
    child = multiprocessing.get_context("fork").Process(target=run_slowly, args=(job,))
    child.start()
    workers: list[psutil.Process] = []
    for _ in range(300):
        found = [path.read_text() for path in tmp_path.glob("*.pid")]
        if len(found) == 2 and all(found):
            workers = [psutil.Process(int(text)) for text in found]
            break
        time.sleep(0.1)
    assert len(workers) == 2
    child.kill()
    child.join()
    _, alive = psutil.wait_procs(workers, timeout=240)
    assert not alive
    assert not list((tmp_path / "out").glob("*.manifest.json"))
    assert run_job(dataclasses.replace(job, read=slow_sources.quickly)).written == 2
    assert not list((tmp_path / "out").glob("*.tmp"))
    assert not list((tmp_path / "out").glob("*.lock"))
