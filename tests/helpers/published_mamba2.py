"""Mamba2 models with random weights as Hugging Face and state-spaces publish them, and what a stage makes of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import Tensor
from transformers import Mamba2Config, Mamba2ForCausalLM

from helpers.training_runs import layout
from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.engine.megatron import MegatronEngine
from megatron_palimpsa.training import checkpoint
from megatron_palimpsa.training.batch import Batch
from megatron_palimpsa.training.stages import find_source

TOKENS = 32


DEEP = {"hidden_size": 128, "num_heads": 8, "head_dim": 32, "initializer_range": 0.05, "num_hidden_layers": 64}
"""Of mamba2-2.7b. With less noise than the others: narrower or noisier, so deep a model loses 1e-4 to fp32 itself."""


def random_mamba2(noise: float = 0.3, **settings: Any) -> Mamba2ForCausalLM:
    torch.manual_seed(0)
    geometry = {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 16, "num_hidden_layers": 3}
    model = Mamba2ForCausalLM(Mamba2Config(**{**geometry, "chunk_size": 16, **settings})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return model


def save_as_state_spaces(model: Mamba2ForCausalLM, folder: Path, vocab_size: int) -> None:
    """As their `save_pretrained` does: what is the default is not said, and a tied output layer is written out."""
    config = model.config
    ssm = {"layer": "Mamba2", "d_state": config.state_size, "headdim": config.head_dim, "ngroups": config.n_groups}
    description = {"d_model": config.hidden_size, "d_intermediate": 0, "n_layer": config.num_hidden_layers}
    description |= {"vocab_size": vocab_size, "ssm_cfg": ssm, "attn_layer_idx": [], "attn_cfg": {}, "rms_norm": True}
    description |= {"residual_in_fp32": True, "fused_add_norm": True, "pad_vocab_size_multiple": 16}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(description | {"tie_embeddings": config.tie_word_embeddings}))
    tensors = {name.replace("embeddings.", "embedding."): value for name, value in model.state_dict().items()}
    torch.save(tensors, folder / "pytorch_model.bin")


def one_document(vocab_size: int) -> Batch:
    tokens = torch.randint(vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    return Batch(tokens, tokens.roll(-1, dims=1), torch.ones(1, TOKENS), torch.tensor([0, TOKENS], dtype=torch.int32))


@torch.no_grad()
def expected(model: Mamba2ForCausalLM, batch: Batch, padded_vocab_size: int) -> tuple[Tensor, Tensor]:
    """Hugging Face's logits [1, T, padded vocabulary], 0 for rows that it has not, and the labels' losses [1, T]."""
    logits = model(batch.tokens).logits
    logits = F.pad(logits, (0, padded_vocab_size - logits.size(-1)))
    return logits, F.cross_entropy(logits[0], batch.labels[0], reduction="none")[None]


def computed(config: StageConfig, batch: Batch) -> tuple[Tensor | None, Tensor]:
    """The same of a stage's model as it starts; the logits on the ranks of the last pipeline stage only."""
    source = find_source(config)
    assert source is not None
    with layout(config):
        engine = MegatronEngine(config)
        checkpoint.load(source.checkpoint, engine, what=source.load)
        shares: list[Tensor] = []
        if (last := engine.chunks[-1]).post_process:
            # A copy: Megatron's loss works in place.
            last.output_layer.register_forward_hook(lambda module, inputs, output: shares.append(output[0].clone()))
        losses, _ = engine.evaluate([batch])
        logits = [gather_from_tensor_model_parallel_region(share).transpose(0, 1).float() for share in shares]
        return (logits[0] if logits else None), losses
