"""Core attention of `*` layers over torch's scaled_dot_product_attention, for packed documents and cached decoding."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from megatron_palimpsa.model.context_parallel import PackedRow, crossed_part, gather_parts, keep_in_graph
from megatron_palimpsa.model.rope import rotated
from megatron_palimpsa.training.batch import RowPart


class CoreAttention(nn.Module):
    """Causal softmax(scale * Q K^T) V, each document by itself; grouped queries; no T x T scores in memory.

    Takes the arguments that Megatron's SelfAttention gives. Under context parallelism a rank's queries meet the keys
    and values of the whole row. With `rope_theta` queries and keys are turned by their places (`rotated`). Dropout, an
    attention bias and any mask but that of padding before cached keys are not implemented and refused.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        rope_theta: float | None = None,
    ) -> None:
        super().__init__()
        if attention_type != "self" or attn_mask_type != AttnMaskType.causal:
            raise ValueError(f"only causal self-attention, not {attention_type} with a {attn_mask_type.name} mask")
        if config.attention_dropout:
            raise ValueError("attention dropout is not implemented for attention layers")
        self.scale = softmax_scale
        self.rope_theta = rope_theta
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["cp"])
        self.cp_group = groups.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: [S, B, Hq, D], or [T, Hq, D] with `packed_seq_params` (format thd).
            key, value: [L, B, Hkv, D] with L >= S: the S queries are the last of L positions; or [T, Hkv, D].
            attention_mask: [B, 1, 1, L], True where a key is padding; only for the one token of cached decoding.
            attn_mask_type: causal; Megatron says no_mask when it decodes behind cached keys, where lower-right
                causality is the same for one token and right for several.

        Returns:
            [S, B, Hq * D], or [T, Hq * D]; 0 behind the last document.
        """
        decoding = packed_seq_params is None and query.shape[0] == 1
        if attention_bias is not None or (attention_mask is not None and not decoding):
            raise ValueError("attention layers are causal within documents: no attention_mask, no attention_bias")
        part = crossed_part(packed_seq_params, self.cp_group)
        if self.rope_theta is not None:
            # Keys are cached as they are: a row's places move when prompts are put side by side.
            query, key = rotated(query, key, 0 if part is None else part.start, self.rope_theta)
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params, part)
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        return self._attend(query, key, value, attention_mask).permute(2, 0, 1, 3).flatten(-2)

    def _packed(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams, part: RowPart | None
    ) -> Tensor:
        offsets = packed.on_host() if isinstance(packed, PackedRow) else packed.cu_seqlens_q.tolist()
        # Where each document's keys start, and how far behind the queries' places those of the keys are.
        starts, shift = offsets[:-1], 0
        if part is not None:
            key, value = gather_parts(torch.stack([key, value]), self.cp_group).transpose(0, 1).flatten(1, 2)
            shift = part.start
            starts = [part.first_start, *(shift + offset for offset in offsets[1:-1])]
        query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        documents = [
            self._attend(
                query[:, start:end][None], key[:, first : shift + end][None], value[:, first : shift + end][None]
            )[0]
            for first, (start, end) in zip(starts, itertools.pairwise(offsets), strict=True)
            if end > start
        ]
        padding = query.shape[1] - offsets[-1]
        if padding:
            documents.append(query.new_zeros(query.shape[0], padding, query.shape[2]))
        output = torch.cat(documents, dim=1).transpose(0, 1).flatten(-2)
        if not offsets[-1]:
            # A part of nothing but padding: backward must still come by.
            for unused in (query, key, value):
                output = keep_in_graph(output, unused)
        return output

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None = None) -> Tensor:
        """query [B, Hq, S, D], key and value [B, Hkv, L, D] -> [B, Hq, S, D]."""
        queries, keys = query.shape[2], key.shape[2]
        mask: Tensor | None = None if padding is None else ~padding
        if 1 < queries < keys:
            mask = causal_lower_right(queries, keys)
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None and queries == keys,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
