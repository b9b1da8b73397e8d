"""Damaged data or a damaged index stops a stage before its first step; an index changes no order; any ranks go on."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.corruptions import CORRUPTIONS, Corruption, write_sealed_set
from helpers.datasets import fake_tokenizer, random_documents, tiny_set, write_blend
from helpers.stages import tiny_stage

from megatron_palimpsa.config import ConfigError, StageConfig
from megatron_palimpsa.training import data
from megatron_palimpsa.training.data import StageData

VOCAB = 61
SEQ = 16


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_sealed_set(tmp_path / "s", fake_tokenizer(tmp_path / "tokenizer.model", VOCAB))
    write_blend(tmp_path / "blend.yaml", [{"set": "s", "weight": 1}])
    return tmp_path


def stage(folder: Path, packing: str = "best-fit", **overrides: Any) -> StageConfig:
    blend = str(folder / "blend.yaml")
    return tiny_stage(
        data={
            "train_blend": blend,
            "valid_blend": blend,
            "tokenizer": str(folder / "tokenizer.model"),
            "packing": packing,
        },
        train={"global_batch_tokens": 4 * SEQ, "tokens": 40 * SEQ},
        model={"seq_length": SEQ},
        **overrides,
    )


@pytest.mark.parametrize("corruption", CORRUPTIONS, ids=lambda corruption: corruption.name)
def test_every_corruption_stops_the_stage(corruption: Corruption, folder: Path) -> None:
    StageData(stage(folder))
    corruption.apply(folder / "s")
    with pytest.raises(ConfigError, match=r"data\.train_blend=.*again") as error:
        StageData(stage(folder))
    assert corruption.named in str(error.value) or "swapped" in corruption.name


@pytest.mark.parametrize("corruption", CORRUPTIONS, ids=lambda corruption: corruption.name)
def test_of_a_large_set_each_rank_reads_its_share(
    corruption: Corruption, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "CHECKSUM_LIMIT", 0)
    corruption.apply(folder / "s")
    found = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "3")
        try:
            StageData(stage(folder))
        except ConfigError:
            found.append(rank)
    assert found
    if corruption.name in ("flipped .bin", "over_vocabulary .bin", "flipped .mask.bin"):
        assert found == [1]


# The index


def rows(config: StageConfig, count: int = 60) -> list[torch.Tensor]:
    return [batch.tokens for batch in itertools.islice(StageData(config).train_batches(0, 0, 1), count)]


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
def test_a_written_index_changes_nothing_and_is_used(packing: str, folder: Path) -> None:
    before = rows(stage(folder, packing))
    fingerprint = StageData(stage(folder, packing)).fingerprint
    folders = StageData(stage(folder, packing), write_index=True).prepare_index()
    assert folders == [folder / "s" / "index"]
    prepared = StageData(stage(folder, packing))
    assert all(map(torch.equal, before, rows(stage(folder, packing))))
    assert prepared.fingerprint == fingerprint
    for batch in itertools.islice(prepared.train_batches(0, 0, 1), 40):
        assert batch.tokens.numel() == SEQ
    prepared.valid_batches()
    assert [index.built for blend in (prepared._train, prepared._valid) for index in blend.indices] == [[], []]


def test_a_damaged_index_stops_the_stage(folder: Path) -> None:
    StageData(stage(folder), write_index=True).prepare_index()
    path = next((folder / "s" / "index").glob("*.segments.npy"))
    segments = np.load(path)
    segments[0, 0] += 1
    np.save(path, segments)
    with pytest.raises(ConfigError, match=r"data\.train_blend=.*segments\.npy.*prep index"):
        StageData(stage(folder))


def test_large_sets_without_an_index_are_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(data, "_INDEX_ADVISED", 5)
    monkeypatch.setattr(logging.getLogger("megatron_palimpsa"), "propagate", True)
    with caplog.at_level(logging.INFO):
        StageData(stage(folder))
        assert "`prep index` builds it once" in caplog.text
        StageData(stage(folder), write_index=True).prepare_index()
        caplog.clear()
        StageData(stage(folder))
    assert not caplog.text


def test_long_reading_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(logging.getLogger("megatron_palimpsa"), "propagate", True)
    monkeypatch.setattr(data, "_SILENT_BYTES", 10)
    with caplog.at_level(logging.INFO):
        StageData(stage(folder))
    assert "GB a rank with their checksums" in caplog.text


# Position


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
def test_a_resume_goes_on_under_any_number_of_ranks(packing: str, tmp_path: Path) -> None:
    """One rank up to sequence 8, then four, then two: together what one rank reads throughout, in its order."""
    tokenizer = fake_tokenizer(tmp_path / "tokenizer.model", VOCAB)
    for number, name in enumerate(("one", "two")):
        tiny_set(tmp_path / name, random_documents(50, 40, VOCAB, seed=number), tokenizer, shards=2)
    write_blend(tmp_path / "blend.yaml", [{"set": "one", "weight": 2}, {"set": "two", "weight": 1}])
    config = stage(tmp_path, packing)
    whole = rows(config, 32)
    parts = [(0, 1, 8), (8, 4, 16), (24, 2, 8)]
    seen = []
    for consumed, ranks, count in parts:
        streams = [StageData(config).train_batches(consumed, rank, ranks) for rank in range(ranks)]
        seen += [next(streams[n % ranks]).tokens for n in range(count)]
    assert all(map(torch.equal, whole, seen))
