"""Huge texts in pieces: the ids are those of the whole, whatever the text and the tokenizer."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from helpers.bpe import stdlib_texts, unicode_text, write_tokenizer
from palimpsa_data import tokenizers
from palimpsa_data.tokenizers import UncuttableError, base, pieces, train_sentencepiece

PIECE = 700


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (base, pieces):
        monkeypatch.setattr(module, "PIECE_CHARACTERS", PIECE)
    monkeypatch.setattr(pieces, "_LONGEST_PIECE", 8 * PIECE)
    monkeypatch.setattr(pieces, "_WINDOW", 350)


def long_unicode(draw: random.Random, length: int) -> str:
    text = ""
    while len(text) < length:
        text += unicode_text(draw) + draw.choice([" ", "\n", "a b", ""])
    return text


TEXTS: dict[str, Callable[[], str]] = {
    "code": lambda: stdlib_texts(1)[0][:40_000],
    "unicode": lambda: long_unicode(random.Random(1), 60_000),
    "spaces": lambda: ("word" + " " * 100 + "\n" * 50) * 100,
    "no spaces": lambda: "one,two;three.four5six" * 1000,
    "chinese": lambda: "中文字符没有空格\uff0c只有标点。" * 1000,
    "one line": lambda: "if(a){b=c.d[1]+'e';}" * 500,
    "accents": lambda: "de\u0301ja\u0300 vu\u0308 \u1100\u1161 " * 2000,
}


SPACELESS = ("no spaces", "chinese", "one line")


def sentencepiece_model(folder: Path, **changes: object) -> Path:
    model = io.BytesIO()
    lines = (line for text in stdlib_texts(3) for line in text.split("\n") if line.strip())
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=model, vocab_size=600, minloglevel=2, num_threads=1, **changes
    )
    path = folder / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(scope="module", params=["gigatoken", "huggingface", "ours", "llama", "unigram"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tokenizers.Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param in ("gigatoken", "huggingface"):
        return tokenizers.load(write_tokenizer(folder, 1500), backend=request.param)
    if request.param == "ours":
        path = folder / "tokenizer.model"
        path.write_bytes(train_sentencepiece(stdlib_texts(3), 600))
    elif request.param == "llama":  # a space before every text, spaces kept, bytes as the fallback
        path = sentencepiece_model(
            folder, model_type="bpe", byte_fallback=True, remove_extra_whitespaces=False, split_digits=True
        )
    else:
        path = sentencepiece_model(folder, model_type="unigram")
    return tokenizers.load(path)


@pytest.mark.parametrize("name", TEXTS)
def test_ids_are_those_of_the_whole(tokenizer: tokenizers.Tokenizer, name: str, request: pytest.FixtureRequest) -> None:
    text = TEXTS[name]()
    whole = tokenizer.encode(text)  # with the real size of pieces, so in one
    assert len(text) < pieces.PIECE_CHARACTERS
    request.getfixturevalue("small_pieces")
    if name in SPACELESS and tokenizer.decode(tokenizer.encode("x")[:1]) != "x":
        with pytest.raises(UncuttableError):  # what puts a space before every text can be cut at spaces only
            tokenizer.encode(text)
        return
    assert np.array_equal(tokenizer.encode(text), whole)
    batch = tokenizer.encode_batch(["a", text, ""])
    assert [len(ids) for ids in batch] == [len(tokenizer.encode("a")), len(whole), 0]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("name", TEXTS)
def test_pieces_stay_small(tmp_path: Path, name: str) -> None:
    tokenizer = tokenizers.load(write_tokenizer(tmp_path, 1500))
    text = TEXTS[name]()
    parts = list(pieces.pieces(text, tokenizer.encode))
    assert "".join(parts) == text
    assert len(parts) > 10
    assert max(map(len, parts)) <= 2 * PIECE


@pytest.mark.usefixtures("small_pieces")
def test_a_text_without_a_place_to_cut(tmp_path: Path) -> None:
    tokenizer = tokenizers.load(write_tokenizer(tmp_path))
    assert len(tokenizer.encode("a" * (8 * PIECE))) > 1000
    with pytest.raises(UncuttableError, match=f"no place to cut in {8 * PIECE} characters"):
        tokenizer.encode("a" * (8 * PIECE + 1))
    # What can be cut before and after does not help.
    with pytest.raises(UncuttableError):
        tokenizer.encode("a b " * PIECE + "a" * (10 * PIECE) + " b a" * PIECE)
