"""Text that continues prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from palimpsa_data.tokenizers import Tokenizer, UncuttableError

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.inference.detokenizer import Detokenizer
from megatron_palimpsa.inference.opened import Opened, opened
from megatron_palimpsa.model.generation import Meter, stream
from megatron_palimpsa.model.sampling import Sampling


def stream_texts(
    it: Opened,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    first_row: int = 0,
    meter: Meter | None = None,
) -> Iterator[list[str | None]]:
    """Continue prompts up to the document's end, a token of each at a time; see `model.generation.stream`.

    Yields:
        What each prompt's text gains: whole characters, at times nothing; None for those that have ended.

    Raises:
        ConfigError: there is no tokenizer, or a prompt is empty or not of the model's vocabulary.
    """
    tokenizer = _tokenizer(it)
    try:
        ids = tokenizer.encode_batch(prompts)
    except UncuttableError as error:
        raise ConfigError(f"a prompt is too long for the tokenizer: {error}") from None
    texts: list[Detokenizer | None] = [Detokenizer(tokenizer, prompt) for prompt in ids]
    steps = stream(
        it.model,
        ids,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_ids=(tokenizer.eod_id,),
        vocab_size=tokenizer.vocab_size,
        first_row=first_row,
        meter=meter,
    )
    for tokens in steps:
        pieces: list[str | None] = []
        for row, (text, token) in enumerate(zip(texts, tokens, strict=True)):
            if text is None:
                pieces.append(None)
            elif token is None:
                pieces.append(text.rest())
                texts[row] = None
            else:
                pieces.append(text.add(token))
        yield pieces
    yield [None if text is None else text.rest() for text in texts]


def generate_texts(
    source: Path, prompts: Sequence[str], *, max_new_tokens: int, sampling: Sampling | None = None
) -> list[str]:
    """The whole continuations of a few prompts, all in one batch, by the model in a folder (`opened`).

    Raises:
        ConfigError, DataError: as `opened` and `stream_texts`.
    """
    texts = [""] * len(prompts)
    with opened(source) as it:
        for pieces in stream_texts(it, prompts, max_new_tokens=max_new_tokens, sampling=sampling):
            texts = [text + (piece or "") for text, piece in zip(texts, pieces, strict=True)]
    return texts


def _tokenizer(it: Opened) -> Tokenizer:
    if it.tokenizer is None:
        raise ConfigError(f"{it.checkpoint}: the model names no tokenizer; name its file with --tokenizer")
    return it.tokenizer
