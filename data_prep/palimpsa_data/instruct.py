"""Instruction pairs: the Alpaca prompt, tokenised apart from the answer, which alone is trained on."""

from __future__ import annotations

import numpy as np

from palimpsa_data.documents import Example, Skipped
from palimpsa_data.shards import Encoded
from palimpsa_data.tokenizers import Tokenizer

_TASK = "Below is an instruction that describes a task"
_REQUEST = "Write a response that appropriately completes the request.\n\n### Instruction:\n"
_RESPONSE = "\n\n### Response:"


def alpaca(
    instruction: str, context: str, answer: str, source: str = "", *, shorten_instruction: bool = False
) -> Example:
    """An example with Alpaca's prompt; `context` is its `input`: the text that the instruction is about, or nothing.

    What may be shortened is that input, or with `shorten_instruction` the instruction, where that holds the document.
    """
    kind = _TASK + (", paired with an input that provides further context. " if context else ". ") + _REQUEST
    label = "\n\n### Input:\n" if context else ""
    if shorten_instruction:
        return Example(kind, instruction, label + context + _RESPONSE, answer, source)
    return Example(kind + instruction + label, context, _RESPONSE, answer, source)


def prompt(instruction: str, context: str = "") -> str:
    """The text that a model trained on these pairs expects before its answer."""
    return alpaca(instruction, context, "").prompt


def encode_example(example: Example, tokenizer: Tokenizer, max_tokens: int) -> Encoded | Skipped:
    """Prompt, answer and end of document; the mask is 1 on the answer and that end.

    An example longer than `max_tokens` loses the middle of its context, never anything of its answer: what surrounds a
    document, and the question behind it, stand at the context's two ends.
    """
    head, context, tail, answer = (
        np.asarray(tokenizer.encode(part), np.int32)
        for part in (example.head, example.context, example.tail, example.answer)
    )
    if not answer.size:
        return Skipped("empty answer")
    answer = np.append(answer, np.int32(tokenizer.eod_id))
    room = max_tokens - len(head) - len(tail) - len(answer)
    if room < 0:
        return Skipped(f"longer than {max_tokens} tokens without its context")
    question = np.concatenate([head, _ends(context, room), tail])
    mask = np.repeat(np.array([0, 1], np.uint8), [len(question), len(answer)])
    return Encoded(np.concatenate([question, answer]), mask)


def _ends(tokens: np.ndarray, room: int) -> np.ndarray:
    """All tokens where there is room for them, else as many from the beginning as from the end."""
    if len(tokens) <= room:
        return tokens
    last = room // 2
    return np.concatenate([tokens[: room - last], tokens[len(tokens) - last :]])
