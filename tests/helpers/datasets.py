"""Small prepared sets and blends for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from palimpsa_data.files import json_sha256, sha256_file
from palimpsa_data.sets import SetInfo, TokenizerInfo, write_set
from palimpsa_data.shards import Encoded, ShardSpec, shard_stem, write_shard


def fake_tokenizer(path: Path, vocab_size: int, content: bytes = b"tokenizer") -> TokenizerInfo:
    """Training only compares the tokenizer file's hash, so any bytes will do; eod is 2, pad is 3."""
    path.write_bytes(content)
    return TokenizerInfo(sha256_file(path), vocab_size, eod_id=2, pad_id=3)


def tiny_set(
    folder: Path,
    documents: Sequence[Sequence[int]],
    tokenizer: TokenizerInfo,
    masks: Sequence[Sequence[int]] | None = None,
    shards: int = 1,
) -> SetInfo:
    """Write documents (ids as they are, end-of-document id included) in order, shard after shard."""
    spec = ShardSpec(
        json_sha256([documents, masks]), tokenizer.sha256, "config", tokenizer.vocab_size, loss_mask=masks is not None
    )
    manifests = {}
    for shard in range(shards):
        part = range(shard * len(documents) // shards, (shard + 1) * len(documents) // shards)
        encoded = [
            Encoded(np.array(documents[i], np.int32), None if masks is None else np.array(masks[i])) for i in part
        ]
        stem = shard_stem(folder, folder.name, shard, shards)
        manifests[stem], _ = write_shard(stem, encoded, spec, most_tokens=sum(len(documents[i]) for i in part))
    return write_set(folder, folder.name, tokenizer, manifests)


def random_documents(count: int, longest: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Documents of 1 to `longest` tokens, ids from 4 up, each ending in 2."""
    draw = np.random.default_rng(seed)
    return [[*draw.integers(4, vocab_size, draw.integers(0, longest)).tolist(), 2] for _ in range(count)]


def write_blend(path: Path, entries: Sequence[dict[str, Any]]) -> Path:
    path.write_text(yaml.safe_dump(list(entries)))
    return path
