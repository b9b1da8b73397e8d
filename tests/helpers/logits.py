"""Logits of a randomly weighted model under tensor parallelism, computed on every rank."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import Tensor

from helpers.stages import random_batch
from helpers.training_runs import layout
from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.model import build_model
from megatron_palimpsa.model.build import packed_sequence
from megatron_palimpsa.model.naming import global_parameters
from megatron_palimpsa.model.tensor_parallel import full_shape
from megatron_palimpsa.model.weights import load_full_weights


def random_weights(name: str, shape: list[int]) -> Tensor:
    """The same unsplit tensor on every rank; norms, D and biases too are unlike their initial 1 and 0."""
    generator = torch.Generator().manual_seed(int(hashlib.sha256(name.encode()).hexdigest()[:12], 16))
    center, scale = (1.0, 0.3) if name.endswith(("norm.weight", ".D")) else (0.0, 0.3)
    if len(shape) == 2:
        scale = shape[1] ** -0.5
    return center + scale * torch.randn(shape, generator=generator)


@torch.no_grad()
def logits(config: StageConfig) -> np.ndarray:
    """[T, vocabulary] of one packed row of documents and padding; the same on every rank."""
    with layout(config):
        model = build_model(config)
        tp = parallel_state.get_tensor_model_parallel_world_size()
        weights = {name: random_weights(name, full_shape(p, tp)) for name, p in global_parameters(model)}
        load_full_weights(model, weights)
        batch = random_batch(config, seed=0, padding=3)
        share = model(
            input_ids=batch.tokens,
            position_ids=None,
            attention_mask=None,
            packed_seq_params=packed_sequence(batch.cu_seqlens),
        )
        return gather_from_tensor_model_parallel_region(share)[0].numpy()
