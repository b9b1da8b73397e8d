"""A packed sequence as training gets it, for people's eyes."""

from __future__ import annotations

from pathlib import Path

from palimpsa_data import tokenizers
from palimpsa_data.dump import LEGEND, marked_text

from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.training.data import StageData


def dump_sequence(config: StageConfig, number: int) -> str:
    """Training sequence `number` of a stage: every document of it decoded, what is not trained on marked.

    Raises:
        ConfigError: see `StageData`.
    """
    reader, segments = StageData(config).train_sequence(number)
    tokenizer = tokenizers.load(Path(config.data.tokenizer), backend="huggingface")
    used = sum(segment.length for segment in segments)
    seq_length = config.model.seq_length
    lines = [
        f"sequence {number} of stage {config.name}: {used} of {seq_length} tokens, set {reader.info.name}; {LEGEND}"
    ]
    for document, start, length in segments:
        tokens, mask = reader.read(document, start, start + length)
        whole = int(reader.lengths[document])
        part = "" if length == whole else f", its tokens {start} to {start + length - 1} of {whole}"
        lines += ["", f"--- document {document}{part}", marked_text(tokens, mask, tokenizer)]
    return "\n".join(lines)
