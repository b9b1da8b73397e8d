"""From shards through packing and the whole model: what one document holds changes no loss of another in its row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.datasets import fake_tokenizer, random_documents, tiny_set, write_blend
from helpers.models import randomise
from helpers.stages import tiny_stage

from megatron_palimpsa import parallel
from megatron_palimpsa.config import ParallelConfig, StageConfig
from megatron_palimpsa.model import build_model, forward_loss
from megatron_palimpsa.training.data import StageData

VOCAB = 61
DOCUMENTS = random_documents(40, 16, VOCAB, seed=9)


@pytest.fixture(autouse=True)
def single_process() -> Iterator[None]:
    parallel.initialize(ParallelConfig(), seed=1)
    yield
    parallel.destroy()


def stage(folder: Path, documents: list[list[int]], packing: str, micro_batch_size: int) -> StageConfig:
    folder.mkdir(exist_ok=True)
    tiny_set(folder / "s", documents, fake_tokenizer(folder / "tokenizer.model", VOCAB), shards=2)
    blend = str(write_blend(folder / "blend.yaml", [{"set": "s", "weight": 1}]))
    return tiny_stage(
        model={"pattern": "PM*-P"},
        data={
            "train_blend": blend,
            "valid_blend": blend,
            "tokenizer": str(folder / "tokenizer.model"),
            "packing": packing,
        },
        train={"micro_batch_size": micro_batch_size, "global_batch_tokens": 64, "tokens": 6400},
    )


@pytest.mark.parametrize("packing", ["best-fit", "concat"])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_documents_of_a_row_do_not_see_each_other(tmp_path: Path, packing: str, micro_batch_size: int) -> None:
    """Every second document is another one of the same length; the losses of the rest stay, bit for bit."""
    changed = [
        document if number % 2 else [*((token - 4 + 7) % (VOCAB - 4) + 4 for token in document[:-1]), 2]
        for number, document in enumerate(DOCUMENTS)
    ]
    data = [
        StageData(stage(tmp_path / name, documents, packing, micro_batch_size))
        for name, documents in (("before", DOCUMENTS), ("after", changed))
    ]
    model = build_model(stage(tmp_path / "before", DOCUMENTS, packing, micro_batch_size))
    randomise(model)
    mixed = 0
    for before, after in itertools.islice(zip(*(one.train_batches(0, 0, 1) for one in data), strict=True), 8):
        assert torch.equal(before.cu_seqlens, after.cu_seqlens)
        with torch.no_grad():
            first, second = (forward_loss(model, batch)[0] for batch in (before, after))
        same = []
        for begin, end in itertools.pairwise(before.cu_seqlens.tolist()):
            part = slice(begin, end)
            same.append(torch.equal(before.tokens[0, part], after.tokens[0, part]))
            if same[-1]:
                counted = before.loss_mask[0, part] == 1
                assert torch.equal(first[part][counted], second[part][counted])
            elif end - begin > 2:
                assert not torch.equal(first[part], second[part])
        mixed += any(same) and not all(same)
    assert mixed > 3
