"""Pieces of text against the text of all ids."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from palimpsa_data import tokenizers
from palimpsa_data.tokenizers import Tokenizer

from megatron_palimpsa.inference.detokenizer import Detokenizer

TEXT = "def f(x):\n    return  'é😀' + \"日本語\" # ½ 👨‍👩‍👧\n\n"


@pytest.fixture(scope="module", params=["sentencepiece", "tokenizer.json"])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    texts = ["def return f(x) for in if else  \n" * 20, "hello world and others " * 30]
    if request.param == "sentencepiece":
        path = folder / "tokenizer.model"
        path.write_bytes(tokenizers.train_sentencepiece(texts, 320))
    else:
        path = folder / "tokenizer.json"
        path.write_bytes(tokenizers.train_json(texts * 10, 310))
    return tokenizers.load(path)


def pieces(tokenizer: Tokenizer, ids, before=()) -> list[str]:
    stream = Detokenizer(tokenizer, before)
    return [*(stream.add(int(token)) for token in ids), stream.rest()]


def test_no_character_is_cut_and_each_comes_with_its_last_byte(tokenizer):
    ids = tokenizer.encode(TEXT)
    found = pieces(tokenizer, ids)
    assert "".join(found) == TEXT
    assert not any("\ufffd" in piece for piece in found)
    assert found[-1] == ""
    # Three bytes make nothing, the fourth the character.
    assert pieces(tokenizer, tokenizer.encode("😀")) == ["", "", "", "😀", ""]


@pytest.mark.parametrize("seed", range(5))
def test_pieces_of_any_ids_are_the_text_of_all(tokenizer, seed):
    generator = random.Random(seed)
    byte_ids = tokenizer.encode("éßñ😀日本語½").tolist()
    for _ in range(20):
        ids = [
            generator.choice(byte_ids) if generator.random() < 0.7 else generator.randrange(tokenizer.vocab_size)
            for _ in range(80)
        ]
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_control_ids_give_nothing_and_lose_nothing(tokenizer):
    ids = [tokenizer.eod_id] * 40 + tokenizer.encode("a 😀").tolist() + [tokenizer.eod_id] * 40
    assert "".join(pieces(tokenizer, ids)) == "a 😀"


def test_bytes_that_never_become_text_do_not_pile_up(tokenizer):
    first_byte = int(tokenizer.encode("😀")[0])
    stream = Detokenizer(tokenizer)
    decoded: list[int] = []

    class Counting:
        def decode(self, ids):
            decoded.append(len(ids))
            return tokenizer.decode(ids)

    stream = Detokenizer(Counting())
    given = "".join(stream.add(first_byte) for _ in range(500))
    assert 500 > len(given) >= 500 - 20
    assert max(decoded) <= 40
    assert given + stream.rest() == "\ufffd" * 500


def test_a_space_that_only_the_beginning_of_a_text_loses_stays_behind_a_prompt():
    class Spaced:
        """As tokenizers that put a space before every text and take it away again."""

        words = (" hello", " world", "!", "")

        def decode(self, ids):
            return "".join(self.words[token] for token in ids).removeprefix(" ")

    assert pieces(Spaced(), [1, 2]) == ["world", "!", ""]
    assert pieces(Spaced(), [1, 2, 1], before=[0]) == [" world", "!", " world", ""]
    assert pieces(Spaced(), [3, 1], before=[0]) == ["", " world", ""]


def test_a_decoder_that_takes_bytes_for_no_text_until_the_last_one_is_there():
    class Fused:
        """As Llama's tokenizer.json: a run of bytes that is no UTF-8 as a whole is U+FFFD, byte for byte."""

        def decode(self, ids):
            run = bytes(ids)
            try:
                return run.decode()
            except UnicodeDecodeError:
                return "\ufffd" * len(run)

    text = "éé😀日本é"
    found = pieces(Fused(), text.encode())
    assert "".join(found) == text
    assert [piece for piece in found if piece] == list(text)
    assert "".join(pieces(Fused(), "日".encode(), before="本日本".encode())) == "日"
