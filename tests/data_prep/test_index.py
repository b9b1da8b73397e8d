"""Arrays that every rank of a job maps: equal to those built in memory, never those of another set or damaged ones."""

from __future__ import annotations

import json
import multiprocessing
import resource
from pathlib import Path

import numpy as np
import pytest
from helpers.datasets import fake_tokenizer, random_documents, tiny_set
from palimpsa_data import DataError, index
from palimpsa_data.index import SetIndex
from palimpsa_data.packing import BestFitPacking, ConcatPacking, Packing
from palimpsa_data.sets import SetReader, Share

DOCUMENTS = random_documents(40, 30, 100, seed=1)


@pytest.fixture
def reader(tmp_path: Path) -> SetReader:
    tiny_set(tmp_path / "s", DOCUMENTS, fake_tokenizer(tmp_path / "tokenizer.model", 100), shards=2)
    return SetReader(tmp_path / "s", checksums=True)


def packing(kind: type[Packing], reader: SetReader, index: SetIndex | None = None) -> Packing:
    arrays = {} if index is None else {"arrays": index}
    return kind(reader.lengths, 16, (1, 0), **arrays)  # type: ignore[call-arg]


def written(kind: type[Packing], reader: SetReader, epochs: int = 3) -> SetIndex:
    index = SetIndex(reader, Share(), write=True)
    made = packing(kind, reader, index)
    for epoch in range(epochs):
        made.prepare(epoch)
    return index


@pytest.mark.parametrize("kind", [ConcatPacking, BestFitPacking])
def test_mapped_equals_built(kind: type[Packing], reader: SetReader) -> None:
    written(kind, reader)
    index = SetIndex(reader, Share())
    mapped, built = packing(kind, reader, index), packing(kind, reader)
    places = range(3 * built.sequences)
    assert [mapped.segments(i) for i in places] == [built.segments(i) for i in places]
    assert (mapped.sequences, mapped.tokens_per_sequence) == (built.sequences, built.tokens_per_sequence)
    assert index.built == []


@pytest.mark.parametrize("kind", [ConcatPacking, BestFitPacking])
def test_what_is_read_is_mapped(kind: type[Packing], reader: SetReader) -> None:
    written(kind, reader)
    index, read = SetIndex(reader, Share()), []

    def arrays(name, build):
        read.extend(index(name, build).values())
        return index(name, build)

    made = kind(reader.lengths, 16, (1, 0), arrays=arrays)  # type: ignore[call-arg]
    made.segments(0)
    assert len(read) == 2
    assert all(isinstance(array, np.memmap) for array in read)


def test_writing_again_writes_nothing(reader: SetReader) -> None:
    written(ConcatPacking, reader)
    before = {path: path.stat().st_mtime_ns for path in (reader.folder / "index").iterdir()}
    assert len(before) == 9
    assert written(ConcatPacking, reader).built == []
    assert before == {path: path.stat().st_mtime_ns for path in (reader.folder / "index").iterdir()}


def test_a_later_epoch_is_built_in_memory(reader: SetReader) -> None:
    written(ConcatPacking, reader, epochs=1)
    index = SetIndex(reader, Share())
    made, built = packing(ConcatPacking, reader, index), packing(ConcatPacking, reader)
    assert made.segments(2 * built.sequences) == built.segments(2 * built.sequences)
    assert index.built == ["concat-v2-1-0-2"]


def test_the_index_of_a_set_as_it_was_is_not_used(reader: SetReader, tmp_path: Path) -> None:
    written(BestFitPacking, reader)
    tiny_set(tmp_path / "s", DOCUMENTS[::-1], fake_tokenizer(tmp_path / "tokenizer.model", 100))
    changed = SetReader(tmp_path / "s", checksums=True)
    index = SetIndex(changed, Share())
    made, built = packing(BestFitPacking, changed, index), packing(BestFitPacking, changed)
    assert [made.segments(i) for i in range(20)] == [built.segments(i) for i in range(20)]
    assert index.built
    assert written(BestFitPacking, changed).built
    assert written(BestFitPacking, changed).built == []


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
@pytest.mark.parametrize("array", ["segments", "offsets"])
def test_damage_is_found_and_mended(damage, array: str, reader: SetReader) -> None:
    written(BestFitPacking, reader)
    (path,) = (reader.folder / "index").glob(f"*.{array}.npy")
    whole = path.read_bytes()
    damage(path)
    with pytest.raises(DataError, match=rf"best-fit-v\d-16\.({array}\.npy|json).*prep index"):
        packing(BestFitPacking, reader, SetIndex(reader, Share()))
    written(BestFitPacking, reader)
    assert path.read_bytes() == whole


def test_each_file_is_read_whole_by_one_rank(reader: SetReader) -> None:
    written(BestFitPacking, reader)
    for path in sorted((reader.folder / "index").glob("*.npy")):
        flip(path)
        found = []
        for rank in range(3):
            try:
                packing(BestFitPacking, reader, SetIndex(reader, Share(rank, 3)))
            except DataError:
                found.append(rank)
        assert len(found) == 1
        flip(path)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"format": 1, "arrays": 5}', b'{"format": 1, "arrays": {"\\u0000": {"bytes": 1}}}']
)
def test_a_record_that_is_none(content: bytes, reader: SetReader) -> None:
    written(BestFitPacking, reader)
    (path,) = (reader.folder / "index").glob("*.json")
    whole = json.loads(path.read_bytes())
    path.write_bytes(content.replace(b'"format"', b'"set_sha256": "%s", "format"' % whole["set_sha256"].encode()))
    with pytest.raises(DataError, match=r"best-fit-v\d-16\.json"):
        packing(BestFitPacking, reader, SetIndex(reader, Share()))


def test_a_folder_that_cannot_be_written(reader: SetReader) -> None:
    (reader.folder / "index").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot write the index .*best-fit"):
        written(BestFitPacking, reader)


def full_while_writing(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
    with pytest.raises(DataError, match=r"cannot write the index .*\.json: File too large; make space"):
        written(BestFitPacking, SetReader(folder, checksums=False))


def test_a_disk_without_room_for_the_last_bytes_is_noticed(reader: SetReader) -> None:
    child = multiprocessing.get_context("fork").Process(target=full_while_writing, args=(reader.folder,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert not list((reader.folder / "index").glob("*.json"))
    written(BestFitPacking, reader)


@pytest.mark.parametrize("shape", [(0,), (5,), (4, 3), (0, 3)])
def test_arrays_are_written_as_numpy_does(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    with (tmp_path / "ours.npy").open("wb") as file:
        index._write_array(file, values)
    np.save(tmp_path / "theirs.npy", values)
    assert (tmp_path / "ours.npy").read_bytes() == (tmp_path / "theirs.npy").read_bytes()


def test_a_kill_while_writing_leaves_nothing_that_counts(reader: SetReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record comes last: arrays without one are built in memory, and written again."""
    monkeypatch.setattr(index, "write_atomically", lambda path, content: None)
    written(BestFitPacking, reader)
    monkeypatch.undo()
    assert list((reader.folder / "index").glob("*.npy"))
    unused = SetIndex(reader, Share())
    packing(BestFitPacking, reader, unused)
    assert unused.built
    assert written(BestFitPacking, reader).built
    assert written(BestFitPacking, reader).built == []
