"""set.json, verification of a whole set, and reading documents back."""

from __future__ import annotations

import dataclasses
import json
import resource
from pathlib import Path

import numpy as np
import psutil
import pytest
from helpers.corruptions import CORRUPTIONS, Corruption, write_sealed_set
from helpers.datasets import fake_tokenizer, random_documents, tiny_set
from palimpsa_data import DataError, sets
from palimpsa_data.files import json_bytes, sha256_file
from palimpsa_data.sets import (
    SetReader,
    Share,
    TokenizerInfo,
    check_set,
    find_problems,
    read_set,
    verify,
    write_set,
)
from palimpsa_data.shards import read_manifest

DOCUMENTS = random_documents(20, 30, 100, seed=1)
MASKS = [[i % 2 for i in range(len(document))] for document in DOCUMENTS]


@pytest.fixture
def tokenizer(tmp_path: Path) -> TokenizerInfo:
    return fake_tokenizer(tmp_path / "tokenizer.model", 100)


@pytest.mark.parametrize("shards", [1, 3])
def test_documents_come_back_in_order_from_any_shard(tmp_path: Path, tokenizer: TokenizerInfo, shards: int) -> None:
    tiny_set(tmp_path / "s", DOCUMENTS, tokenizer, MASKS, shards)
    reader = SetReader(tmp_path / "s", checksums=True)
    assert reader.lengths.tolist() == [len(document) for document in DOCUMENTS]
    for number, document in enumerate(DOCUMENTS):
        for start, stop in ((0, len(document)), (0, len(document) + 1), (len(document) // 2, len(document) - 1)):
            tokens, mask = reader.read(number, start, stop)
            assert mask is not None
            assert tokens.tolist() == document[start:stop]
            assert mask.tolist() == MASKS[number][start:stop]


def test_totals_are_the_sums_of_the_shards(tmp_path: Path, tokenizer: TokenizerInfo) -> None:
    info = tiny_set(tmp_path / "s", DOCUMENTS, tokenizer, MASKS, shards=3)
    assert info == read_set(tmp_path / "s") == verify(tmp_path / "s")
    assert (info.documents, info.tokens) == (20, sum(map(len, DOCUMENTS)))
    assert info.trained_tokens == sum(map(sum, MASKS))
    assert info.longest == max(map(len, DOCUMENTS))
    assert sum(shard.tokens for shard in info.shards) == info.tokens


def test_a_shard_without_documents_is_read(tmp_path: Path, tokenizer: TokenizerInfo) -> None:
    tiny_set(tmp_path / "s", [[5, 2]], tokenizer, shards=2)
    reader = SetReader(tmp_path / "s", checksums=True)
    assert reader.read(0, 0, 9)[0].tolist() == [5, 2]
    verify(tmp_path / "s")


def test_a_set_without_tokens_is_refused(tmp_path: Path, tokenizer: TokenizerInfo) -> None:
    with pytest.raises(DataError, match="would hold no token; left out were none, the inputs are empty"):
        tiny_set(tmp_path / "s", [], tokenizer)


def test_shards_of_another_tokenizer_are_refused(tmp_path: Path, tokenizer: TokenizerInfo) -> None:
    tiny_set(tmp_path / "s", DOCUMENTS, tokenizer)
    stem = tmp_path / "s" / "s-00000-of-00001"
    with pytest.raises(DataError, match=r"s-00000-of-00001\.manifest\.json: made with another tokenizer"):
        write_set(tmp_path / "s", "s", dataclasses.replace(tokenizer, sha256="other"), {stem: read_manifest(stem)})


def test_an_unfinished_set_is_refused(tmp_path: Path, tokenizer: TokenizerInfo) -> None:
    tiny_set(tmp_path / "s", DOCUMENTS, tokenizer)
    (tmp_path / "s" / "set.json").unlink()
    with pytest.raises(DataError, match=r"set\.json is missing"):
        read_set(tmp_path / "s")


def test_an_edited_manifest_is_found(tmp_path: Path, tokenizer: TokenizerInfo) -> None:
    tiny_set(tmp_path / "s", DOCUMENTS, tokenizer)
    path = tmp_path / "s" / "s-00000-of-00001.manifest.json"
    path.write_text(path.read_text().replace('"config"', '"other"'))
    with pytest.raises(DataError, match=r"s-00000-of-00001\.manifest\.json: changed"):
        check_set(tmp_path / "s", checksums=False)


def test_swapped_shards_of_one_size_are_found(tmp_path: Path, tokenizer: TokenizerInfo) -> None:
    tiny_set(tmp_path / "s", [[5, 6, 2], [7, 8, 2]], tokenizer, shards=2)
    first, second = (tmp_path / "s" / f"s-0000{i}-of-00002.bin" for i in range(2))
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    with pytest.raises(DataError, match=r"s-00000-of-00002\.bin: content differs"):
        verify(tmp_path / "s")


def test_verify_looks_at_the_ids_themselves(tmp_path: Path, tokenizer: TokenizerInfo) -> None:
    """An id over the vocabulary behind checksums that agree with it: made by a writer that did not look."""
    tiny_set(tmp_path / "s", [[5, 6, 2]], tokenizer)
    stem = tmp_path / "s" / "s-00000-of-00001"
    np.array([5, 600, 2], np.uint16).tofile(f"{stem}.bin")
    manifest = json.loads(Path(f"{stem}.manifest.json").read_text())
    manifest["outputs"]["s-00000-of-00001.bin"]["sha256"] = sha256_file(Path(f"{stem}.bin"))
    Path(f"{stem}.manifest.json").write_bytes(json_bytes(manifest))
    content = json.loads((tmp_path / "s" / "set.json").read_text())
    content["shards"][0]["manifest_sha256"] = sha256_file(Path(f"{stem}.manifest.json"))
    (tmp_path / "s" / "set.json").write_bytes(json_bytes(content))
    with pytest.raises(DataError, match=r"s-00000-of-00001\.bin: id 600 is outside the vocabulary of 100"):
        verify(tmp_path / "s")


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"format": 1, "surprise": 2}', b'{"format": 9}'])
def test_another_file_in_place_of_set_json_is_refused(tmp_path: Path, tokenizer: TokenizerInfo, content: bytes) -> None:
    tiny_set(tmp_path / "s", DOCUMENTS, tokenizer)
    (tmp_path / "s" / "set.json").write_bytes(content)
    with pytest.raises(DataError, match=r"set\.json"):
        read_set(tmp_path / "s")


@pytest.mark.parametrize("corruption", CORRUPTIONS, ids=lambda corruption: corruption.name)
def test_every_corruption_is_found_and_its_shard_named(
    corruption: Corruption, tmp_path: Path, tokenizer: TokenizerInfo
) -> None:
    write_sealed_set(tmp_path / "s", tokenizer)
    assert find_problems(tmp_path / "s", tokenizer.sha256) == []
    corruption.apply(tmp_path / "s")
    problems = find_problems(tmp_path / "s")
    assert any(corruption.named in problem for problem in problems)
    assert all("again" in problem for problem in problems)
    with pytest.raises(DataError):
        verify(tmp_path / "s")


def test_a_set_of_another_tokenizer_is_found(tmp_path: Path, tokenizer: TokenizerInfo) -> None:
    write_sealed_set(tmp_path / "s", tokenizer)
    (problem,) = find_problems(tmp_path / "s", "another hash")
    assert "set.json: made with another tokenizer" in problem


def test_all_bad_shards_are_named(tmp_path: Path, tokenizer: TokenizerInfo) -> None:
    tiny_set(tmp_path / "s", DOCUMENTS, tokenizer, shards=4)
    for shard in (1, 3):
        (tmp_path / "s" / f"s-0000{shard}-of-00004.bin").unlink()
    problems = find_problems(tmp_path / "s")
    assert [f"s-0000{shard}-of-00004" in problem for shard, problem in zip((1, 3), problems, strict=True)] == [True] * 2


def test_shares_together_read_everything(tmp_path: Path, tokenizer: TokenizerInfo) -> None:
    tiny_set(tmp_path / "s", DOCUMENTS, tokenizer, shards=4)
    for shard in range(4):
        path = tmp_path / "s" / f"s-0000{shard}-of-00004.bin"
        whole = path.read_bytes()
        path.write_bytes(whole[:-2] + whole[-4:-2])
        found = [rank for rank in range(3) if not whole_to(tmp_path / "s", Share(rank, 3))]
        assert found == [shard % 3]
        path.write_bytes(whole)


def whole_to(folder: Path, share: Share) -> bool:
    try:
        check_set(folder, checksums=True, share=share)
    except DataError:
        return False
    return True


def test_a_set_of_more_shards_than_files_may_be_open(
    tmp_path: Path, tokenizer: TokenizerInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_set(tmp_path / "s", DOCUMENTS, tokenizer, MASKS, shards=20)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(sets, "_MOST_MAPPED", 3)
    resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 15, hard))
    try:
        reader = SetReader(tmp_path / "s", checksums=True)
        for number, document in enumerate([*DOCUMENTS, *DOCUMENTS]):
            number %= len(DOCUMENTS)
            tokens, mask = reader.read(number, 0, 99)
            assert tokens.tolist() == document
            assert mask is not None
            assert mask.tolist() == MASKS[number]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
