"""The .idx that we write against Megatron's own builder, byte by byte, for both sizes of ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from palimpsa_data import DataError
from palimpsa_data.indexed import index_bytes, read_index, token_dtype
from palimpsa_data.shards import Encoded, ShardSpec, shard_stem, write_shard


@pytest.mark.parametrize("vocab_size", [50_277, 65_499, 65_500, 100_000])
def test_files_are_those_of_megatrons_builder(tmp_path: Path, vocab_size: int) -> None:
    draw = np.random.default_rng(vocab_size)
    documents = [draw.integers(0, vocab_size, length) for length in (1, 700, 3, 1, 20_000)]
    dtype = token_dtype(vocab_size)
    assert dtype == DType.optimal_dtype(vocab_size)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype.type)
    for document in documents:
        builder.add_document(torch.from_numpy(document), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    stem = shard_stem(tmp_path, "ours", 0, 1)
    write_shard(stem, map(Encoded, documents), ShardSpec("i", "t", "c", vocab_size, loss_mask=False))
    for suffix in (".bin", ".idx"):
        assert stem.with_name(stem.name + suffix).read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()
    dataset = IndexedDataset(str(stem))
    assert [dataset[number].tolist() for number in range(len(dataset))] == [ids.tolist() for ids in documents]


def test_an_index_comes_back(tmp_path: Path) -> None:
    lengths = np.array([5, 1, 2**31 - 1, 2**31 - 1, 7])
    path = tmp_path / "x.idx"
    path.write_bytes(index_bytes(np.dtype(np.uint16), lengths))
    index = read_index(path)
    assert index.lengths.tolist() == lengths.tolist()
    assert index.starts.tolist() == np.cumsum([0, *lengths[:-1]]).tolist()
    assert index.dtype == np.uint16


@pytest.mark.parametrize("cut", [0, 10, 33, 34, 50, -1])
def test_a_cut_index_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.idx"
    path.write_bytes(index_bytes(np.dtype(np.int32), np.array([2, 3]))[:cut])
    with pytest.raises(DataError, match=r"x\.idx: not a .*Megatron index"):
        read_index(path)


def test_every_flipped_bit_of_a_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.idx"
    whole = index_bytes(np.dtype(np.int32), np.array([2, 3]))
    for bit in range(8 * 34):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"x\.idx: not a .*Megatron index|do not agree"):
            read_index(path)
