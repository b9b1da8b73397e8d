"""The shard protocol: what is committed, what survives a kill at each of its steps, what is refused."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.jobs import content, die_at, killed
from megatron.core.datasets.indexed_dataset import IndexedDataset
from palimpsa_data import DataError
from palimpsa_data.documents import Skipped
from palimpsa_data.shards import (
    Encoded,
    ShardSpec,
    check_shard,
    is_complete,
    manifest_path,
    read_index,
    read_manifest,
    shard_stem,
    write_shard,
)

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

SPEC = ShardSpec("input", "tokenizer", "config", vocab_size=1000, loss_mask=True)
DOCUMENTS = [
    Encoded(np.array([5, 6, 999, 2]), np.array([0, 0, 1, 1])),
    Skipped("too short"),
    Encoded(np.array([2])),
    Encoded(np.array([], np.int64)),
    Skipped("too short"),
    Encoded(np.arange(300)),
]


def write(stem: Path, spec: ShardSpec = SPEC) -> bool:
    return write_shard(stem, iter(DOCUMENTS), spec, most_tokens=1000)[1]


@pytest.fixture
def stem(tmp_path: Path) -> Path:
    return shard_stem(tmp_path / "set", "x", 0, 1)


def test_megatron_reads_what_was_written(stem: Path) -> None:
    write(stem)
    dataset = IndexedDataset(str(stem))
    assert [dataset[i].tolist() for i in range(len(dataset))] == [[5, 6, 999, 2], [2], list(range(300))]
    assert dataset[0].dtype == np.uint16
    index = read_index(stem.with_name(stem.name + ".idx"))
    assert index.lengths.tolist() == dataset.sequence_lengths.tolist()
    assert index.starts.tolist() == [0, 4, 5]
    mask = np.fromfile(stem.with_name(stem.name + ".mask.bin"), np.uint8)
    assert mask.tolist() == [0, 0, 1, 1, 1] + [1] * 300


def test_manifest_counts_everything(stem: Path) -> None:
    write(stem)
    manifest = read_manifest(stem)
    assert (manifest.documents, manifest.tokens, manifest.trained_tokens) == (3, 305, 303)
    assert (manifest.longest, manifest.max_id, manifest.dtype) == (300, 999, "uint16")
    assert manifest.skipped == {"empty": 1, "too short": 2}
    assert sorted(manifest.outputs) == [stem.name + suffix for suffix in (".bin", ".idx", ".mask.bin")]


def test_a_large_vocabulary_is_not_wrapped(stem: Path) -> None:
    spec = ShardSpec("input", "tokenizer", "config", vocab_size=100_000, loss_mask=False)
    write_shard(stem, [Encoded(np.array([99_999, 65_536]))], spec, most_tokens=2)
    dataset = IndexedDataset(str(stem))
    assert dataset[0].tolist() == [99_999, 65_536]


def test_a_rerun_skips_only_what_verifies(stem: Path) -> None:
    assert write(stem)
    before = content(stem.parent)
    assert not write(stem)
    assert write(stem, ShardSpec("other input", "tokenizer", "config", 1000, True))
    assert write(stem)
    assert content(stem.parent) == before
    path = stem.with_name(stem.name + ".bin")
    path.write_bytes(path.read_bytes()[:-1])
    assert write(stem)
    assert content(stem.parent) == before


def test_files_of_another_spec_do_not_stay(stem: Path) -> None:
    write(stem)
    write(stem, ShardSpec("input", "tokenizer", "config", 1000, loss_mask=False))
    assert not stem.with_name(stem.name + ".mask.bin").exists()


@pytest.mark.parametrize("older", ["nothing", "another spec"])
def test_killed_at_every_step_then_rerun_gives_the_same_bytes(tmp_path: Path, older: str) -> None:
    expected = shard_stem(tmp_path / "expected", "x", 0, 1)
    write(expected)
    stem = shard_stem(tmp_path / "set", "x", 0, 1)
    kills = 0
    for call in range(1, 200):
        shutil.rmtree(stem.parent, ignore_errors=True)
        if older == "another spec":
            write(stem, ShardSpec("older input", "tokenizer", "config", 1000, True))
        if not killed(die_at, call, lambda: write(stem)):
            break
        kills += 1
        if manifest_path(stem).exists():  # then it speaks for files that are all there
            check_shard(stem, checksums=True)
        write(stem)
        assert content(stem.parent) == content(expected.parent)
    assert kills >= 20
    assert content(stem.parent) == content(expected.parent)


def test_killed_while_documents_are_written(stem: Path) -> None:
    def documents() -> Iterator[Encoded]:
        yield DOCUMENTS[0]  # type: ignore[misc]
        os.kill(os.getpid(), signal.SIGKILL)

    assert killed(lambda: write_shard(stem, documents(), SPEC, most_tokens=10))
    assert sorted(path.suffix for path in stem.parent.iterdir()) == [".lock", ".tmp", ".tmp"]
    assert write(stem)
    assert check_shard(stem, checksums=True).tokens == 305
    assert not list(stem.parent.glob("*.tmp"))


def damage_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def damage_flip(path: Path) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[40 % len(damaged)] ^= 1
    path.write_bytes(damaged)


def damage_swap(path: Path) -> None:
    other = shard_stem(path.parent / "other", "y", 0, 1)
    write_shard(other, [Encoded(np.arange(400))], SPEC, most_tokens=400)
    path.write_bytes(other.with_name(other.name + path.name.partition("-of-00001")[2]).read_bytes())


@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, damage_swap, Path.unlink])
@pytest.mark.parametrize("suffix", [".bin", ".idx", ".mask.bin", ".manifest.json"])
def test_damage_is_found_and_named(stem: Path, suffix: str, damage: Any) -> None:
    write(stem)
    path = stem.with_name(stem.name + suffix)
    damage(path)
    # A whole foreign manifest is found by the files that it names.
    name = "y-00000" if (suffix, damage) == (".manifest.json", damage_swap) else path.name
    with pytest.raises(DataError, match=name):
        check_shard(stem, checksums=True)


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".mask.bin"])
def test_truncation_is_found_without_checksums(stem: Path, suffix: str) -> None:
    write(stem)
    path = stem.with_name(stem.name + suffix)
    damage_truncate(path)
    with pytest.raises(DataError, match=f"{path.name} holds .* truncated"):
        check_shard(stem, checksums=False)


@pytest.mark.parametrize("wrong", [1000, 70_000, -1])
def test_ids_outside_the_vocabulary_are_refused(stem: Path, wrong: int) -> None:
    with pytest.raises(DataError, match=rf"id {wrong} is outside 0\.\.999"):
        write_shard(stem, [Encoded(np.array([1, wrong]))], SPEC, most_tokens=2)
    assert not is_complete(stem, SPEC)


def test_a_mask_of_another_length_is_refused(stem: Path) -> None:
    with pytest.raises(DataError, match="3 entries for 2 tokens"):
        write_shard(stem, [Encoded(np.array([1, 2]), np.array([0, 1, 1]))], SPEC, most_tokens=2)


def test_too_little_disk_is_said_before_anything_is_written(stem: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**30, 2**30 - 2**20, 2**20))  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"3\.0 MiB needed, 1\.0 MiB free"):
        write_shard(stem, iter(DOCUMENTS), SPEC, most_tokens=2**20)
    assert not list(stem.parent.iterdir())


def full_disk(stem: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    with pytest.raises(DataError, match=r"cannot write shard .* stays unfinished"):
        write_shard(stem, [Encoded(np.arange(900)) for _ in range(20)], SPEC, most_tokens=18_000)


def test_disk_full_in_the_middle_leaves_nothing_valid(stem: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=full_disk, args=(stem,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert not is_complete(stem, SPEC)
    assert write(stem)
