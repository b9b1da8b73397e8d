"""Losses by position in the document, against a loop over documents."""

import itertools

import pytest
import torch
from helpers.stages import random_batch, tiny_stage

from megatron_palimpsa.training.batch import Batch
from megatron_palimpsa.training.validation import document_positions, loss_by_position, position_edges


@pytest.mark.parametrize(
    ("seq_length", "edges"),
    [
        (8, [0, 8]),
        (16, [0, 16]),
        (32, [0, 16, 32]),
        (100, [0, 16, 32, 64, 100]),
        (1024, [0, *(2**n for n in range(4, 11))]),
    ],
)
def test_edges_double_up_to_the_sequence_length(seq_length, edges):
    assert position_edges(seq_length) == edges


def batch(offsets, total):
    tokens = torch.zeros(1, total, dtype=torch.int64)
    return Batch(tokens, tokens, torch.ones(1, total), torch.tensor(offsets, dtype=torch.int32))


def test_positions_restart_at_every_document_and_padding_does_not_matter():
    positions = document_positions(batch([0, 3, 3, 7], 9))
    assert positions[:7].tolist() == [0, 1, 2, 0, 1, 2, 3]


def test_means_equal_a_loop_over_documents():
    config = tiny_stage(train={"micro_batch_size": 2})
    batches = [random_batch(config, seed, padding=5) for seed in range(3)]
    losses = torch.rand(3, batches[0].tokens.shape[1], generator=torch.Generator().manual_seed(1))
    edges = [0, 4, 9, 32]
    collected = [[], [], []]
    for row, item in zip(losses, batches, strict=True):
        offsets = item.cu_seqlens.tolist()
        for start, end in itertools.pairwise(offsets):
            for place in range(start, end):
                if item.loss_mask[0, place]:
                    bucket = next(i for i in range(3) if edges[i] <= place - start < edges[i + 1])
                    collected[bucket].append(float(row[place]))
    expected = [sum(values) / len(values) for values in collected]
    assert loss_by_position(losses, batches, edges) == pytest.approx(expected, rel=1e-6)


def test_positions_that_no_document_reaches_have_no_loss():
    assert loss_by_position(torch.ones(1, 8), [batch([0, 4, 8], 8)], [0, 4, 8]) == [1.0, None]
