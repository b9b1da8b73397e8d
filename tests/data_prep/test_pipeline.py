"""Items to a shard: ids and masks as they should be, everything left out counted, gigatoken's ids watched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from helpers.bpe import stdlib_texts, write_tokenizer
from palimpsa_data import DataError, pipeline, tokenizers
from palimpsa_data.documents import Document, Example, Item, Skipped
from palimpsa_data.lengths import BUCKETS
from palimpsa_data.pipeline import Done, Limits, write_input
from palimpsa_data.shards import Manifest, ShardSpec, read_index, shard_stem
from palimpsa_data.tokenizers import Tokenizer, base, pieces
from palimpsa_data.tokenizers.base import Batch
from palimpsa_data.tokenizers.json_file import GigatokenTokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizers.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def write(
    folder: Path, items: Sequence[Item], tokenizer: Tokenizer, limits: Limits | None = None, *, loss_mask: bool = False
) -> tuple[Manifest, list[list[int]], list[Done]]:
    """-> manifest, ids of each document, what was reported."""
    spec = ShardSpec("input", tokenizer.sha256, "config", tokenizer.vocab_size, loss_mask)
    stem = shard_stem(folder, "x", 0, 1)
    reported: list[Done] = []
    manifest, written = write_input(items, tokenizer, spec, stem, limits=limits or Limits(), progress=reported.append)
    assert written
    index = read_index(stem.with_name(stem.name + ".idx"))
    tokens = np.fromfile(stem.with_name(stem.name + ".bin"), index.dtype)
    assert tokens.size == manifest.tokens
    bounds = zip(index.starts.tolist(), index.lengths.tolist(), strict=True)
    return manifest, [tokens[start : start + length].tolist() for start, length in bounds], reported


def test_documents_are_their_ids_and_an_end(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_BATCH_CHARACTERS", 10_000)
    texts = [text[:3000] for text in stdlib_texts(20)]
    items = [Document(text, f"source {number % 3}") for number, text in enumerate(texts)]
    manifest, documents, reported = write(tmp_path, items, tokenizer)
    assert documents == [tokenizer.encode_document(text).tolist() for text in texts]
    lengths = [len(ids) for ids in documents]
    assert (manifest.documents, manifest.tokens, manifest.trained_tokens) == (20, sum(lengths), sum(lengths))
    assert (manifest.shortest, manifest.longest) == (min(lengths), max(lengths))
    assert manifest.text_bytes == sum(len(text.encode()) for text in texts)
    assert manifest.sources == {
        f"source {number}": [len(lengths[number::3]), sum(lengths[number::3])] for number in range(3)
    }
    assert len(reported) > 3
    assert sum(done.tokens for done in reported) == manifest.tokens
    assert sum(done.documents for done in reported) == 20
    assert sum(done.text_bytes for done in reported) == manifest.text_bytes


def test_lengths_are_counted_in_buckets(tmp_path: Path, tokenizer: Tokenizer) -> None:
    _, documents, _ = write(tmp_path / "a", [Document("a")], tokenizer)
    assert len(documents[0]) == 2
    manifest, documents, _ = write(tmp_path / "b", [Document("a " * n) for n in (1, 1, 5, 90, 300)], tokenizer)
    buckets = BUCKETS.tolist()
    expected = Counter(max(bucket for bucket in buckets if bucket <= len(ids)) for ids in documents)
    assert manifest.lengths == {str(bucket): count for bucket, count in sorted(expected.items())}
    assert buckets[:6] == [1, 2, 3, 4, 5, 6]
    assert buckets[-1] > 5 * 10**11


def test_what_is_left_out_is_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    items: list[Item] = [
        Document(""),
        Document("a"),
        Document("a b c d e f g h"),
        Document("abc" * 100),
        Document("half \ud800"),
        Skipped("not wanted"),
        Skipped("broken", damaged=True),
        Document("b c d e"),
    ]
    manifest, documents, _ = write(tmp_path, items, tokenizer, Limits(min_tokens=4, max_tokens=50))
    assert [tokenizer.decode(ids) for ids in documents] == ["a b c d e f g h", "b c d e"]
    assert manifest.skipped == {
        "broken": 1,
        "empty": 1,
        "fewer than 4 tokens": 1,
        "more than 50 tokens": 1,
        "not Unicode: half of a surrogate pair": 1,
        "not wanted": 1,
    }
    assert manifest.damaged == 2


def test_limits_count_the_end(tmp_path: Path, tokenizer: Tokenizer) -> None:
    size = len(tokenizer.encode_document("some words here"))
    items = [Document("some words here")]
    assert write(tmp_path / "a", items, tokenizer, Limits(min_tokens=size, max_tokens=size))[1]
    assert not write(tmp_path / "b", items, tokenizer, Limits(min_tokens=size + 1))[1]
    assert not write(tmp_path / "c", items, tokenizer, Limits(max_tokens=size - 1))[1]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"min_tokens": 0}, "--min-tokens must be at least 1, not 0"),
        ({"max_tokens": 0}, "--max-tokens 0 is below --min-tokens 1, or 2"),
        ({"max_tokens": 9, "min_tokens": 10}, "--max-tokens 9 is below --min-tokens 10"),
        ({"max_example_tokens": -1}, "--max-example-tokens must be at least 2, not -1"),
    ],
)
def test_limits_that_leave_nothing_are_refused(limits: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Limits(**limits)


def test_examples_train_on_answers_alone(tmp_path: Path, tokenizer: Tokenizer) -> None:
    items = [
        Example("ask: ", "context", "\n", "the answer", "s"),
        Document("text", "t"),
        Example("a", "", "b", "", "s"),
    ]
    manifest, documents, reported = write(tmp_path, items, tokenizer, loss_mask=True)
    mask = np.fromfile(tmp_path / "x-00000-of-00001.mask.bin", np.uint8)
    trained = np.concatenate(documents)[mask == 1].tolist()
    assert trained == [*tokenizer.encode_document("the answer"), *tokenizer.encode_document("text")]
    assert manifest.trained_tokens == len(trained)
    assert manifest.skipped == {"empty answer": 1}
    assert manifest.text_bytes == len("ask: context\nthe answertext")
    assert sum(done.documents for done in reported) == 2


def test_a_text_that_cannot_be_cut_does_not_take_others_with_it(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (base, pieces):
        monkeypatch.setattr(module, "PIECE_CHARACTERS", 400)
    monkeypatch.setattr(pieces, "_LONGEST_PIECE", 800)
    monkeypatch.setattr(pieces, "_WINDOW", 350)
    items = [Document("one", "s"), Document("a" * 2000, "s"), Document("two words " * 100, "s")]
    manifest, documents, _ = write(tmp_path, items, tokenizer)
    assert [tokenizer.decode(ids) for ids in documents] == ["one", "two words " * 100]
    assert manifest.skipped == {"no place to cut in 800 characters": 1}
    assert manifest.text_bytes == 1003


class Wrong(GigatokenTokenizer):
    """Right for the probes, wrong for what holds `qqq`."""

    def _encode(self, texts: Sequence[str]) -> Batch:
        return super()._encode([text.replace("qqq", "p") for text in texts])


def test_other_ids_than_hugging_faces_end_the_shard(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert isinstance(tokenizer, GigatokenTokenizer)
    wrong = Wrong(tokenizer.reference)
    items = [Document(text[:200] + "qqq") for text in stdlib_texts(4)]
    with pytest.raises(DataError, match=r"other ids than Hugging Face from token .* --backend huggingface"):
        write(tmp_path / "x", items, wrong)
    assert not list((tmp_path / "x").iterdir())
    long = [Document("a b " * 10_000 + "qqq")]  # compared at its beginning only
    assert write(tmp_path / "y", long, wrong)[1]
    with pytest.raises(DataError, match="other ids"):
        write(tmp_path / "z", [Document("qqq" + "a b " * 10_000)], wrong)


def test_some_documents_of_few_batches_are_compared(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_BATCH_CHARACTERS", 1000)
    compared: list[str] = []
    assert isinstance(tokenizer, GigatokenTokenizer)
    encode = tokenizer.reference.encode
    monkeypatch.setattr(tokenizer.reference, "encode", lambda text: (compared.append(text), encode(text))[1])
    items = [Document(f"document {number} " + "x" * 90) for number in range(400)]
    write(tmp_path, items, tokenizer)
    assert 15 < len(compared) < 40
    assert len(set(compared)) == len(compared)
