"""SentencePiece: reproducible training, every text there and back, no control ids from text."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from palimpsa_data import DataError
from palimpsa_data.tokenizers import Tokenizer, load, train_sentencepiece

LITERALS = "<s> </s> <unk> <pad> <|endoftext|> <0x0A> <0x00>\n</s>\n\n<|endoftext|>"


def texts() -> list[str]:
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    return [(stdlib / name).read_text() for name in ("ast.py", "json/decoder.py", "textwrap.py")] + [LITERALS] * 50


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(train_sentencepiece(texts(), 512))
    return load(path)


def test_the_same_text_gives_the_same_bytes(tokenizer: Tokenizer) -> None:
    assert train_sentencepiece(iter(texts()), 512) == tokenizer.path.read_bytes()


def test_special_ids_are_distinct(tokenizer: Tokenizer) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer.path))
    ids = [processor.unk_id(), processor.bos_id(), tokenizer.eod_id, tokenizer.pad_id]
    assert sorted(ids) == [0, 1, 2, 3]
    assert (tokenizer.vocab_size, tokenizer.info.vocab_size) == (512, 512)


def test_literal_control_strings_stay_text(tokenizer: Tokenizer) -> None:
    """Even when the tokenizer was trained on a text full of them."""
    ids = tokenizer.encode(LITERALS).tolist()
    assert min(ids) > 3
    assert tokenizer.decode(ids) == LITERALS
    assert tokenizer.encode_document(LITERALS).tolist() == [*ids, tokenizer.eod_id]


def test_whitespace_of_code_is_kept_and_short(tokenizer: Tokenizer) -> None:
    code = "def f():\n\tif x:\n        return  1\r\n\n\n  "
    assert tokenizer.decode(tokenizer.encode(code)) == code
    assert len(tokenizer.encode("        return")) <= 3


def test_parts_cut_at_line_breaks_encode_like_the_whole(tokenizer: Tokenizer) -> None:
    """Nothing is put in front of a text, so prompts can be encoded in parts."""
    assert tokenizer.encode("def f():\n    return").tolist() == [
        *tokenizer.encode("def f():"),
        *tokenizer.encode("\n"),
        *tokenizer.encode("    return"),
    ]
    assert len(tokenizer.encode("d")) == 1


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
def test_every_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    # U+2581 is SentencePiece's own sign for a space and comes back as one.
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(3 < i < tokenizer.vocab_size for i in ids)


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.model"):
        load(tmp_path / "none.model")
    (tmp_path / "text.model").write_text("not a model")
    with pytest.raises(DataError, match=r"text\.model"):
        load(tmp_path / "text.model")


def test_too_little_text_is_said() -> None:
    with pytest.raises(DataError, match="cannot train a tokenizer with 2048 ids"):
        train_sentencepiece(["short"], 2048)
