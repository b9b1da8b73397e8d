"""Text from a trained stage."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from palimpsa_data import tokenizers

from megatron_palimpsa import parallel
from megatron_palimpsa.config import ConfigError, ParallelConfig, load_stage
from megatron_palimpsa.engine.megatron import MegatronEngine
from megatron_palimpsa.model.generation import generate
from megatron_palimpsa.training import checkpoint
from megatron_palimpsa.training.run_folder import RunFolder


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
    folder = RunFolder(stage)
    config = dataclasses.replace(load_stage(folder.config), parallel=ParallelConfig(distributed_optimizer=False))
    tokenizer = tokenizers.load(Path(config.data.tokenizer))
    parallel.initialize(config.parallel, config.seed)
    try:
        path = checkpoint.latest(folder.checkpoints)
        if path is None:
            raise ConfigError(f"{folder.checkpoints}: holds no intact checkpoint")
        engine = MegatronEngine(config)
        checkpoint.load(path, engine, what="weights")
        (model,) = engine.chunks
        ids = generate(
            model,
            tokenizer.encode(prompt).tolist(),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop_ids=(tokenizer.eod_id,),
            vocab_size=tokenizer.vocab_size,
        )
    finally:
        parallel.destroy()
    return tokenizer.decode(ids)
