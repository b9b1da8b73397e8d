"""Random microbatches: full, packed, the same for the same seed."""

import itertools

import torch
from helpers.stages import tiny_stage

from megatron_palimpsa.bench.batches import random_batch, random_batches


def test_documents_fill_each_sequence_and_their_last_tokens_have_no_loss():
    config = tiny_stage(
        model={"seq_length": 512}, train={"global_batch_tokens": 1024, "micro_batch_size": 2, "tokens": 102400}
    )
    batch = random_batch(config, seed=3)
    lengths = batch.cu_seqlens.diff()
    assert batch.tokens.shape == batch.labels.shape == batch.loss_mask.shape == (1, 1024)
    assert batch.tokens.min() >= 0
    assert batch.tokens.max() < config.model.vocab_size
    assert batch.cu_seqlens[0] == 0
    assert batch.cu_seqlens[-1] == 1024
    assert 512 in batch.cu_seqlens
    assert lengths.min() >= 1
    assert lengths.max() <= 512
    assert len(set(lengths.tolist())) > 2
    assert torch.equal(batch.labels[0, :-1], batch.tokens[0, 1:])
    ends = set((batch.cu_seqlens[1:] - 1).tolist())
    assert set((batch.loss_mask[0] == 0).nonzero().flatten().tolist()) == ends


def test_the_seed_decides():
    config = tiny_stage()
    first, again, other = (random_batch(config, seed) for seed in (1, 1, 2))
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.cu_seqlens, again.cu_seqlens)
    assert not torch.equal(first.tokens, other.tokens)


def test_every_step_has_the_same_microbatches_on_any_number_of_ranks():
    config = tiny_stage(4, train={"global_batch_tokens": 8 * 32, "micro_batch_size": 1, "tokens": 25600})

    def step(dp_rank, dp_size, number):
        count = 8 // dp_size
        batches = itertools.islice(random_batches(config, dp_rank, dp_size), number * count, (number + 1) * count)
        return [tuple(batch.tokens[0].tolist()) for batch in batches]

    alone = step(0, 1, 0)
    assert len(set(alone)) == 8
    assert step(0, 1, 1) == alone
    assert step(0, 2, 0) + step(1, 2, 1) == alone
    assert [batch for rank in range(4) for batch in step(rank, 4, 0)] == alone
