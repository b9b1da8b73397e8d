"""Attention of `*` layers against scores written out, packed and cached."""

from __future__ import annotations

import pytest
import torch
from helpers.stages import random_batch, tiny_stage
from megatron.core.transformer.enums import AttnMaskType

from megatron_palimpsa.model.attention import CoreAttention
from megatron_palimpsa.model.build import packed_sequence, transformer_config


def core_attention() -> CoreAttention:
    return CoreAttention(transformer_config(tiny_stage()), 1, AttnMaskType.causal, "self")


def written_out(query, key, value):
    """[S, Hq, D], [L, Hkv, D] -> [S, Hq * D] in float64; the queries are the last of the L positions."""
    query, key, value = (t.double() for t in (query, key, value))
    queries, heads, dim = query.shape
    keys, groups, _ = key.shape
    outputs = torch.zeros(queries, heads, dim, dtype=torch.float64)
    for head in range(heads):
        group = head // (heads // groups)
        for i in range(queries):
            seen = keys - queries + i + 1
            scores = key[:seen, group] @ query[i, head] / dim**0.5
            outputs[i, head] = scores.softmax(0) @ value[:seen, group]
    return outputs.flatten(1).float()


def random_qkv(queries, keys, heads, groups):
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(queries, heads, 8, generator=generator),
        torch.randn(keys, groups, 8, generator=generator),
        torch.randn(keys, groups, 8, generator=generator),
    )


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_documents_attend_to_themselves_and_padding_is_zero(groups):
    offsets = [0, 5, 5, 6, 17]
    q, k, v = random_qkv(20, 20, 4, groups)
    packed = packed_sequence(torch.tensor(offsets, dtype=torch.int32))
    actual = core_attention()(q, k, v, None, packed_seq_params=packed)
    assert torch.equal(actual[17:], torch.zeros(3, 32))
    for start, end in ((0, 5), (5, 6), (6, 17)):
        expected = written_out(q[start:end], k[start:end], v[start:end])
        torch.testing.assert_close(actual[start:end], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (1, 9), (4, 9)])
def test_queries_are_the_last_of_the_keys(queries, keys):
    q, k, v = random_qkv(queries, keys, 4, 2)
    actual = core_attention()(q[:, None], k[:, None], v[:, None], None, attn_mask_type=AttnMaskType.no_mask)
    torch.testing.assert_close(actual[:, 0], written_out(q, k, v), atol=1e-5, rtol=1e-5)


def test_what_is_not_implemented_is_refused():
    q, k, v = (t[:, None] for t in random_qkv(4, 4, 4, 4))
    with pytest.raises(ValueError, match="no attention_mask"):
        core_attention()(q, k, v, torch.ones(4, 4, dtype=torch.bool))
    config = transformer_config(tiny_stage())
    with pytest.raises(ValueError, match="padding"):
        CoreAttention(config, 1, AttnMaskType.padding, "self")
    config.attention_dropout = 0.1
    with pytest.raises(ValueError, match="dropout"):
        CoreAttention(config, 1, AttnMaskType.causal, "self")


def test_documents_are_read_from_the_device_at_most_once():
    class Offsets:
        read = 0

        def tolist(self):
            self.read += 1
            return [0, 3, 8]

    offsets = Offsets()
    packed = packed_sequence(offsets)
    q, k, v = random_qkv(8, 8, 4, 4)
    first, again = (core_attention()(q, k, v, None, packed_seq_params=packed) for _ in range(2))
    assert torch.equal(first, again)
    assert offsets.read == 1
    assert torch.equal(
        core_attention()(q, k, v, None, packed_seq_params=packed_sequence(offsets, offsets=(0, 3, 8))), first
    )
    assert offsets.read == 1


def test_a_batch_on_its_way_to_the_device_takes_its_documents_along():
    config = tiny_stage()
    batch = random_batch(config, 0)
    moved = batch.to("cpu")
    assert list(moved.offsets) == batch.cu_seqlens.tolist()
    part = batch.of_rank(1, 2).to("cpu")
    assert list(part.offsets) == part.cu_seqlens.tolist()
