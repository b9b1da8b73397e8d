"""Text from a trained stage."""

from __future__ import annotations

from pathlib import Path

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.inference import opened
from megatron_palimpsa.model.generation import generate


def generate_text(
    stage: Path,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> str:
    """Continue a prompt with the newest checkpoint of a stage's folder, on one process, up to the document's end.

    See `model.generation.generate` for the settings.

    Raises:
        ConfigError: the folder holds no stage or no intact checkpoint.
        DataError: the tokenizer cannot be read.
    """
    with opened(stage) as it:
        if it.tokenizer is None:
            raise ConfigError(f"{stage}: names no tokenizer (data.tokenizer)")
        ids = generate(
            it.model,
            it.tokenizer.encode(prompt).tolist(),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop_ids=(it.tokenizer.eod_id,),
            vocab_size=it.tokenizer.vocab_size,
        )
        return it.tokenizer.decode(ids)
