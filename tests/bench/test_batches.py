"""Random microbatches: full, packed, the same for the same seed."""

import torch
from helpers.stages import tiny_stage

from megatron_palimpsa.bench.batches import random_batch


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
