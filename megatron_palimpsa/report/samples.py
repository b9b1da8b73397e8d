"""A few lines that the last stage generates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from palimpsa_data.instruct import prompt

_INSTRUCTIONS = (
    "What does the function dumps of Python's module json do?",
    "What does the function copytree of Python's module shutil do?",
    "What does the Python reference manual say under the heading 'The \"while\" statement'?",
)
_MAX_NEW_TOKENS = 64


@dataclass(frozen=True)
class Sample:
    prompt: str
    answer: str


def generate_samples(stage: Path) -> list[Sample]:
    """The likeliest answers of the model in a stage's folder to fixed instructions."""
    from megatron_palimpsa.training.generate import generate_text

    return [
        Sample(text, generate_text(stage, prompt(text), max_new_tokens=_MAX_NEW_TOKENS, temperature=0.0).strip())
        for text in _INSTRUCTIONS
    ]
