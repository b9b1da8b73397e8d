"""Tiny stages and random packed batches for tests."""

from __future__ import annotations

from typing import Any

import torch

from megatron_palimpsa.config import StageConfig, check_stage, stage_from_dict
from megatron_palimpsa.training.batch import Batch

TINY: dict[str, Any] = {
    "name": "tiny",
    "output_dir": "runs/tiny",
    "model": {
        "pattern": "MP*-P",
        "hidden_size": 32,
        "vocab_size": 61,
        "seq_length": 32,
        "d_state": 8,
        "headdim": 8,
        "ngroups": 1,
        "beta_rank": 4,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 64,
    },
    "data": {"train_blend": "train.yaml", "valid_blend": "valid.yaml", "tokenizer": "tokenizer.model"},
    "train": {"tokens": 64 * 100, "global_batch_tokens": 64, "precision": "fp32", "eval_batches": 2},
    "optimizer": {"lr": 1e-2, "warmup_steps": 2},
}


def tiny_stage(world_size: int = 1, **overrides: Any) -> StageConfig:
    """The tiny stage with values replaced: `tiny_stage(model={"ngroups": 2}, parallel={"tp": 2}, seed=7)`."""
    tree = {**TINY, **{key: value for key, value in overrides.items() if not isinstance(value, dict)}}
    for section, values in overrides.items():
        if isinstance(values, dict):
            tree[section] = {**TINY.get(section, {}), **values}
    config = stage_from_dict(tree, where="tiny_stage")
    check_stage(config, world_size)
    return config


def random_batch(config: StageConfig, seed: int, padding: int = 0) -> Batch:
    """One microbatch of documents of random lengths, labels shifted by one, no loss at document ends.

    The last `padding` tokens of the last sequence are padding.
    """
    generator = torch.Generator().manual_seed(seed)
    seq_length, sequences = config.model.seq_length, config.train.micro_batch_size
    total = seq_length * sequences
    tokens = torch.randint(config.model.vocab_size, (1, total), generator=generator)
    labels = tokens.roll(-1, dims=1)
    mask = torch.ones(1, total)
    offsets = [0]
    for sequence in range(sequences):
        end = (sequence + 1) * seq_length - (padding if sequence == sequences - 1 else 0)
        while offsets[-1] < end:
            length = int(torch.randint(1, seq_length // 2 + 1, (), generator=generator))
            offsets.append(min(offsets[-1] + length, end))
            mask[0, offsets[-1] - 1] = 0.0
    mask[0, offsets[-1] :] = 0.0
    return Batch(tokens, labels, mask, torch.tensor(offsets, dtype=torch.int32))
