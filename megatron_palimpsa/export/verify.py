"""`convert verify`: whether two models compute the same function, on one document and in float32.

A side is a published Mamba2 model, run by Hugging Face's implementation; a stage or one of its checkpoints, run by the
trainer's model; or what `export` wrote, run by transformers. One side at a time is in memory.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from palimpsa_data import tokenizers
from torch import Tensor

from megatron_palimpsa.config import ConfigError, ModelConfig, load_stage
from megatron_palimpsa.convert.mamba2 import ALSO_NAMED
from megatron_palimpsa.convert.mamba2_config import read_geometry
from megatron_palimpsa.convert.named_tensors import EMBEDDINGS, HEAD
from megatron_palimpsa.convert.sources import locate, open_tensors, read_json
from megatron_palimpsa.export.optional import require_transformers
from megatron_palimpsa.export.reading import is_export, open_export
from megatron_palimpsa.export.settings import dtype_of
from megatron_palimpsa.training.parameters import count_parameters
from megatron_palimpsa.training.saved import folder_of, is_stage

logger = logging.getLogger(__name__)

TOLERANCE = 1e-4
"""Largest difference of two logits that counts as rounding, beside the largest logit."""


@dataclass(frozen=True)
class Side:
    """A model to be compared, not in memory yet."""

    what: str
    model: ModelConfig
    tokenizer: Path | None
    rounded: bool
    """Its weights are in bf16 but for those that stay fp32."""
    logits: Callable[[Tensor, bool], Tensor]
    """Of ids [1, T] -> [T, at least vocab_size] fp32; True first rounds to bf16 what a bf16 export has in it."""


@dataclass(frozen=True)
class Comparison:
    """What two sides gave for the same ids."""

    tokens: int
    difference: float
    """Largest of two logits."""
    largest: float
    """Logit of the source by its size."""
    agreeing: int
    """Tokens at which both hold the same next id for the likeliest."""

    @property
    def passed(self) -> bool:
        return self.difference <= TOLERANCE * self.largest


def verify(source: str, target: Path, text: Path | None = None, tokens: int = 256) -> Comparison:
    """Compare the logits of `source` (a folder, or a name on the hub) with those of `target`.

    Args:
        text: a file whose first tokens are the document; None takes ids at random.
        tokens: of the document, at most.

    Raises:
        ConfigError: a side is no model that can be run, they differ in their vocabularies, or the text is empty.
        DataError: the tokenizer cannot be read.
    """
    if tokens < 1:
        raise ConfigError(f"--tokens {tokens}: at least one is needed")
    require_transformers()
    sides = [_side(source), _side(str(target))]
    sizes = [side.model.vocab_size for side in sides]
    # Hugging Face's files of a state-spaces model may count its padding among its ids.
    if len({side.model.padded_vocab_size for side in sides}) > 1:
        raise ConfigError(f"{source} has a vocabulary of {sizes[0]} ids, {target} one of {sizes[1]}")
    ids = _ids(sides, text, tokens, min(sizes))
    needed = 4 * max(count_parameters(side.model) for side in sides)
    free = psutil.virtual_memory().available
    logger.info("One model at a time in float32: %.1f GB of memory, %.1f GB are free", 1e-9 * needed, 1e-9 * free)
    rounded = any(side.rounded for side in sides)
    logits = []
    for side in sides:
        logger.info("%s: %s", side.what, "its weights rounded to bf16" if rounded and not side.rounded else "as it is")
        with torch.no_grad():
            logits.append(side.logits(ids, rounded and not side.rounded)[:, : min(sizes)].clone())
        gc.collect()
    ours, theirs = logits
    difference = float((ours - theirs).abs().max())
    return Comparison(
        ids.shape[1], difference, float(ours.abs().max()), int((ours.argmax(-1) == theirs.argmax(-1)).sum())
    )


def _side(source: str) -> Side:
    path = Path(source)
    if is_stage(path):
        config = load_stage(folder_of(path).config)
        tokenizer = Path(config.data.tokenizer) if config.data.tokenizer else None
        return Side(f"{source} (the trainer's model)", config.model, tokenizer, False, lambda *a: _of_trainer(path, *a))
    if is_export(path):
        exported = open_export(path)
        return Side(
            f"{source} (transformers, the exported code)",
            exported.model,
            exported.tokenizer,
            dtype_of(read_json(path / "config.json"), source) == "bf16",
            lambda *a: _of_export(path, *a),
        )
    folder = locate(source)
    geometry = read_geometry(read_json(folder / "config.json"), str(folder / "config.json"))
    tokenizer = folder / "tokenizer.json" if (folder / "tokenizer.json").is_file() else None
    model = ModelConfig(**geometry.section, seq_length=1)
    what = f"{source} (Hugging Face's Mamba2)"
    return Side(what, model, tokenizer, False, lambda *a: _of_mamba2(folder, model, geometry.vocabulary_rows, *a))


def _ids(sides: list[Side], text: Path | None, tokens: int, vocab_size: int) -> Tensor:
    """The document [1, T]."""
    if text is None:
        return torch.randint(vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    files = [side.tokenizer for side in sides if side.tokenizer is not None and side.tokenizer.is_file()]
    if not files:
        raise ConfigError("--text: neither of the models has a tokenizer; without it ids are taken at random")
    try:
        content = text.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{text}: cannot be read: {error}") from None
    ids = tokenizers.load(files[-1], backend="huggingface").encode(content)[:tokens]
    if not len(ids):
        raise ConfigError(f"{text}: is empty")
    return torch.tensor([ids.tolist()])


def _of_trainer(path: Path, ids: Tensor, rounded: bool) -> Tensor:
    from megatron_palimpsa.inference import opened

    with opened(path, "fp32") as it:
        if rounded:
            for parameter in it.model.parameters():
                if not getattr(parameter, "keep_fp32", False):
                    parameter.copy_(parameter.bfloat16())
        device = next(it.model.parameters()).device
        return it.model(input_ids=ids.to(device), position_ids=None, attention_mask=None)[0].float().cpu()


def _of_export(path: Path, ids: Tensor, rounded: bool) -> Tensor:
    from megatron_palimpsa.hf import PalimpsaHybridForCausalLM
    from megatron_palimpsa.hf.mixers_palimpsa import FP32_PARAMETERS

    model = PalimpsaHybridForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    if rounded:
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[2] not in FP32_PARAMETERS:
                parameter.copy_(parameter.bfloat16())
    return _logits(model, ids)


def _of_mamba2(folder: Path, model: ModelConfig, rows: int, ids: Tensor, rounded: bool) -> Tensor:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    from megatron_palimpsa.hf.mixers_palimpsa import FP32_PARAMETERS

    config = Mamba2Config(
        vocab_size=rows,
        hidden_size=model.hidden_size,
        state_size=model.d_state,
        num_hidden_layers=len(model.layers),
        num_heads=model.nheads,
        head_dim=model.headdim,
        expand=model.expand,
        n_groups=model.ngroups,
        conv_kernel=model.d_conv,
        layer_norm_epsilon=model.norm_eps,
        residual_in_fp32=model.fp32_residual,
        tie_word_embeddings=model.tie_embeddings,
    )
    with torch.device("meta"):
        theirs = Mamba2ForCausalLM(config)
    weights = {ALSO_NAMED.get(name, name): stored for name, stored in open_tensors(folder).items()}
    state = {name: stored.rows(slice(None)).float() for name, stored in weights.items() if name != HEAD}
    state[HEAD] = state[EMBEDDINGS] if model.tie_embeddings else weights[HEAD].rows(slice(None)).float()
    if rounded:
        for name, value in state.items():
            if name.rpartition(".")[2] not in FP32_PARAMETERS:
                state[name] = value.bfloat16().float()
    theirs.load_state_dict(state, assign=True)
    return _logits(theirs.eval(), ids)


def _logits(model: Any, ids: Tensor) -> Tensor:
    if torch.cuda.is_available():
        model = model.cuda()
    return model(ids.to(model.device), use_cache=False).logits[0].float().cpu()
