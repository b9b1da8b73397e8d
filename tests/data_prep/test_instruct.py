"""Instruction pairs: the Alpaca prompt, loss on the answer only, the answer never shortened."""

from __future__ import annotations

import numpy as np
import pytest
from palimpsa_data.documents import Example, Skipped
from palimpsa_data.instruct import alpaca, encode_example, prompt
from palimpsa_data.shards import Encoded


class Characters:
    """One id a character: what is cut where can be read off."""

    eod_id = 2

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]


def encode(example: Example, max_tokens: int) -> Encoded | Skipped:
    return encode_example(example, Characters(), max_tokens)  # type: ignore[arg-type]


def text(ids: np.ndarray) -> str:
    return "".join(map(chr, ids.tolist()))


def test_the_prompts_are_alpacas() -> None:
    assert prompt("Sing.") == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nSing.\n\n### Response:"
    )
    assert prompt("Shorten.", "A long text.") == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nShorten.\n\n### Input:\nA long text.\n\n### Response:"
    )


@pytest.mark.parametrize("context", ["", "the text"])
def test_loss_is_on_the_answer_and_its_end(context: str) -> None:
    encoded = encode(alpaca("Say it.", context, "So."), 1000)
    assert isinstance(encoded, Encoded)
    assert encoded.mask is not None
    assert text(encoded.tokens) == prompt("Say it.", context) + "So." + chr(2)
    assert text(encoded.tokens[encoded.mask == 1]) == "So." + chr(2)
    assert encoded.mask.tolist() == sorted(encoded.mask.tolist())


@pytest.mark.parametrize(
    ("missing", "context"), [(0, "0123456789"), (1, "0123456789"[:5] + "6789"), (4, "012789"), (9, "0"), (10, "")]
)
def test_a_long_example_loses_the_middle_of_its_context(missing: int, context: str) -> None:
    whole = len(prompt("Say it.", "0123456789")) + len("The answer.") + 1
    encoded = encode(alpaca("Say it.", "0123456789", "The answer."), whole - missing)
    assert isinstance(encoded, Encoded)
    empty = prompt("Say it.", "|").replace("|", context)
    assert text(encoded.tokens) == empty + "The answer." + chr(2)
    assert len(encoded.tokens) == whole - missing
    assert encoded.mask is not None
    assert text(encoded.tokens[encoded.mask == 1]) == "The answer." + chr(2)


def test_a_document_inside_the_instruction_is_shortened_between_its_beginning_and_its_question() -> None:
    instruction = f"Below is a paper. {'x' * 5000} Now the paper ends. What is it about?"
    encoded = encode(alpaca(instruction, "", "Of x.", shorten_instruction=True), 1000)
    assert isinstance(encoded, Encoded)
    assert len(encoded.tokens) == 1000
    assert "### Instruction:\nBelow is a paper. xxx" in text(encoded.tokens)
    assert text(encoded.tokens).endswith("xxx Now the paper ends. What is it about?\n\n### Response:Of x." + chr(2))


def test_what_cannot_keep_its_answer_is_left_out() -> None:
    least = len(prompt("Say it.", "x")) - 1 + len("The answer.") + 1
    assert isinstance(encode(alpaca("Say it.", "0123456789", "The answer."), least), Encoded)
    assert encode(alpaca("Say it.", "0123456789", "The answer."), least - 1) == Skipped(
        f"longer than {least - 1} tokens without its context"
    )
    assert encode(alpaca("Say it.", "", ""), 1000) == Skipped("empty answer")
