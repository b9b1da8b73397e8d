"""Text that continues prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.models import randomise
from helpers.runs import read_checkpoint
from helpers.stages import tiny_stage
from palimpsa_data import tokenizers

from megatron_palimpsa import parallel
from megatron_palimpsa.config import ConfigError, ParallelConfig, load_stage
from megatron_palimpsa.inference import Opened
from megatron_palimpsa.inference.text import generate_texts, stream_texts
from megatron_palimpsa.model import build_model
from megatron_palimpsa.model.generation import generate
from megatron_palimpsa.model.sampling import Sampling


@pytest.fixture
def opened_model(tiny_data: Path) -> Iterator[Opened]:
    """More ids than the tokenizer's 320, random weights."""
    parallel.initialize(ParallelConfig(), seed=1)
    config = tiny_stage(model={"pattern": "PM*", "vocab_size": 1000})
    model = build_model(config).eval()
    randomise(model)
    yield Opened(model, config, tokenizers.load(tiny_data / "tokenizer.model"), Path("step-1"))
    parallel.destroy()


def test_text_is_that_of_the_checkpoints_weights(trained_stage: Path, tmp_path: Path) -> None:
    config = load_stage(trained_stage / "config.yaml")
    assert config.data.tokenizer is not None
    tokenizer = tokenizers.load(Path(config.data.tokenizer))
    weights = read_checkpoint(trained_stage / "checkpoints" / "step-8", tmp_path)
    prompt = tokenizer.encode("abc").tolist()
    parallel.initialize(config.parallel, seed=1)
    try:
        model = build_model(config)
        initial = generate(model, prompt, max_new_tokens=12)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
        expected = generate(model, prompt, max_new_tokens=12, stop_ids=(tokenizer.eod_id,))
    finally:
        parallel.destroy()
    assert expected != initial
    assert generate_texts(trained_stage, ["abc", "hij"], max_new_tokens=12)[0] == tokenizer.decode(expected)


def test_pieces_are_those_of_each_prompt_and_ids_that_the_tokenizer_lacks_are_never_chosen(
    opened_model: Opened,
) -> None:
    prompts = ["abc", "de fgh abc de", "j"]
    sampling = Sampling(temperature=10.0, seed=3)
    steps = list(stream_texts(opened_model, prompts, max_new_tokens=32, sampling=sampling))
    texts = ["".join(piece or "" for piece in column) for column in zip(*steps, strict=True)]
    drawn = []
    for row, prompt in enumerate(prompts):
        (alone,) = zip(
            *stream_texts(opened_model, [prompt], max_new_tokens=32, sampling=sampling, first_row=row), strict=True
        )
        assert "".join(piece or "" for piece in alone) == texts[row]
        drawn.append(len(texts[row]))
    # Drawn evenly from 1000 ids, of which 680 have no text, this would fail.
    assert min(drawn) > 10


def test_a_prompt_that_has_ended_gives_none(opened_model: Opened) -> None:
    tokenizer = opened_model.tokenizer
    assert tokenizer is not None
    continued = generate(opened_model.model, tokenizer.encode("abc"), max_new_tokens=6, vocab_size=320)
    tokenizer.eod_id = continued[2]
    end = continued.index(tokenizer.eod_id)
    steps = list(stream_texts(opened_model, ["abc", "de fgh"], max_new_tokens=6))
    assert [step[0] is None for step in steps] == [False] * (end + 1) + [True] * (len(steps) - end - 1)
    assert len(steps) == 7
    assert "".join(step[0] or "" for step in steps) == tokenizer.decode(continued[:end])


def test_a_text_follows_its_prompt(opened_model: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    # As tokenizers that put a space before every text and take it away again.
    monkeypatch.setattr(opened_model.tokenizer, "decode", lambda ids: "".join(f" {i}" for i in ids)[1:])
    ((piece,), *_) = stream_texts(opened_model, ["abc"], max_new_tokens=1)
    assert piece is not None
    assert piece.startswith(" ")


def test_what_cannot_be_continued_is_refused(opened_model: Opened) -> None:
    with pytest.raises(ConfigError, match="the prompt is empty"):
        list(stream_texts(opened_model, ["abc", ""], max_new_tokens=1))
    without = Opened(opened_model.model, opened_model.config, None, opened_model.checkpoint)
    with pytest.raises(ConfigError, match="step-1: the model names no tokenizer; name its file with --tokenizer"):
        list(stream_texts(without, ["abc"], max_new_tokens=1))
    config = tiny_stage(model={"pattern": "M", "vocab_size": 61})
    small = Opened(build_model(config).eval(), config, opened_model.tokenizer, opened_model.checkpoint)
    with pytest.raises(ConfigError, match="outside of the model's vocabulary of 61"):
        list(stream_texts(small, ["abc"], max_new_tokens=1))
