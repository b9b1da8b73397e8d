"""A few lines that the last stage generates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from palimpsa_data.instruct import prompt

_PROMPTS = {
    text: prompt(text)
    for text in (
        "What does the function dumps of Python's module json do?",
        "What does the function copytree of Python's module shutil do?",
    )
}
_PROMPTS |= {text: text for text in ("def main(", "The default value is")}
_MAX_NEW_TOKENS = 48
TEMPERATURE, TOP_P = 0.7, 0.9


@dataclass(frozen=True)
class Sample:
    prompt: str
    answer: str


def generate_samples(stage: Path) -> list[Sample]:
    """What the model in a stage's folder says to two instructions and how it goes on with two beginnings; sampled."""
    from megatron_palimpsa.inference.text import generate_texts
    from megatron_palimpsa.model.sampling import Sampling

    sampling = Sampling(temperature=TEMPERATURE, top_p=TOP_P)
    texts = generate_texts(stage, list(_PROMPTS.values()), max_new_tokens=_MAX_NEW_TOKENS, sampling=sampling)
    return [Sample(shown, text.strip()) for shown, text in zip(_PROMPTS, texts, strict=True)]
