"""Blends to batches: labels and masks token by token, order, position, weights, and every wrong input refused."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.datasets import fake_tokenizer, random_documents, tiny_set, write_blend
from helpers.stages import tiny_stage

from megatron_palimpsa.config import ConfigError, StageConfig
from megatron_palimpsa.training.batch import Batch
from megatron_palimpsa.training.data import StageData

VOCAB = 61
SEQ = 16
ONE = random_documents(60, 40, VOCAB, seed=1)
TWO = random_documents(30, 12, VOCAB, seed=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Sets `one` and `two`, blends and a tokenizer."""
    tokenizer = fake_tokenizer(tmp_path / "tokenizer.model", VOCAB)
    tiny_set(tmp_path / "one", ONE, tokenizer, shards=2)
    tiny_set(tmp_path / "two", TWO, tokenizer)
    write_blend(tmp_path / "train.yaml", [{"set": "one", "weight": 0.75}, {"set": "two", "weight": 0.25}])
    write_blend(tmp_path / "valid.yaml", [{"set": "two", "weight": 1}])
    return tmp_path


def stage(folder: Path, packing: str = "best-fit", seq_length: int = SEQ, **overrides: Any) -> StageConfig:
    data = {key: str(folder / f"{key.removesuffix('_blend')}.yaml") for key in ("train_blend", "valid_blend")}
    data |= {"tokenizer": str(folder / "tokenizer.model"), "packing": packing}
    train = {"global_batch_tokens": 4 * seq_length, "tokens": 400 * seq_length} | overrides.pop("train", {})
    model = {"seq_length": seq_length} | overrides.pop("model", {})
    return tiny_stage(data=data, train=train, model=model, **overrides)


def train(config: StageConfig, count: int, consumed: int = 0, dp_rank: int = 0, dp_size: int = 1) -> list[Batch]:
    return list(itertools.islice(StageData(config).train_batches(consumed, dp_rank, dp_size), count))


def documents(batch: Batch) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Tokens, labels and loss mask of each document part in a row."""
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        part = slice(start, end)
        yield batch.tokens[0, part].tolist(), batch.labels[0, part].tolist(), batch.loss_mask[0, part].tolist()


def equal(first: Batch, second: Batch) -> bool:
    names = ("tokens", "labels", "loss_mask", "cu_seqlens")
    return all(torch.equal(getattr(first, name), getattr(second, name)) for name in names)


# What a batch holds


def by_hand(tmp_path: Path, packing: str, micro_batch_size: int) -> Batch:
    """An answer of three tokens behind a prompt, and a document all of which is trained on."""
    tokenizer = fake_tokenizer(tmp_path / "tokenizer.model", VOCAB)
    tiny_set(tmp_path / "s", [[10, 11, 12, 13, 2], [20, 21, 2]], tokenizer, masks=[[0, 0, 1, 1, 1], [1, 1, 1]])
    for name in ("train.yaml", "valid.yaml"):
        write_blend(tmp_path / name, [{"set": "s", "weight": 1}])
    config = stage(tmp_path, packing, seq_length=8, train={"micro_batch_size": micro_batch_size})
    return train(config, 1)[0]


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
def test_masks_and_labels_token_by_token(tmp_path: Path, packing: str) -> None:
    batch = by_hand(tmp_path, packing, micro_batch_size=1)
    first = ([10, 11, 12, 13, 2], [11, 12, 13, 2, 3], [0, 1, 1, 1, 0])
    second = ([20, 21, 2], [21, 2, 3], [1, 1, 0])
    assert list(documents(batch)) in ([first, second], [second, first])
    assert (batch.tokens.dtype, batch.labels.dtype, batch.loss_mask.dtype, batch.cu_seqlens.dtype) == (
        torch.int64,
        torch.int64,
        torch.float32,
        torch.int32,
    )
    assert batch.tokens.shape == batch.labels.shape == batch.loss_mask.shape == (1, 8)


def test_padding_comes_last_in_the_row(tmp_path: Path) -> None:
    tokenizer = fake_tokenizer(tmp_path / "tokenizer.model", VOCAB)
    tiny_set(tmp_path / "s", [[10, 11, 12, 13, 2], [20, 21, 22, 2]], tokenizer)
    for name in ("train.yaml", "valid.yaml"):
        write_blend(tmp_path / name, [{"set": "s", "weight": 1}])
    batch = train(stage(tmp_path, seq_length=8, train={"micro_batch_size": 2}), 1)[0]
    assert batch.cu_seqlens.tolist() in ([0, 5, 9], [0, 4, 9])
    assert batch.tokens.shape == (1, 16)
    assert batch.tokens[0, 9:].tolist() == batch.labels[0, 9:].tolist() == [3] * 7
    assert batch.loss_mask[0, 9:].sum() == 0
    assert batch.loss_mask.sum() == 7


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
def test_each_transition_is_trained_once_an_epoch(tmp_path: Path, packing: str) -> None:
    """Cutting a document loses nothing: the last token of a part is trained to give the next part's first."""
    tokenizer = fake_tokenizer(tmp_path / "tokenizer.model", VOCAB)
    long = [list(range(4, 54)), list(range(5, 50)), [60, 2]]  # 97 tokens
    tiny_set(tmp_path / "s", long, tokenizer)
    for name in ("train.yaml", "valid.yaml"):
        write_blend(tmp_path / name, [{"set": "s", "weight": 1}])
    trained: Counter[tuple[int, int]] = Counter()
    config = stage(tmp_path, packing, train={"eval_batches": 50})
    for batch in StageData(config).valid_batches():
        for tokens, labels, mask in documents(batch):
            trained.update(pair for pair, counts in zip(zip(tokens, labels, strict=True), mask, strict=True) if counts)
    assert trained == Counter(pair for document in long for pair in itertools.pairwise(document))


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_no_document_crosses_a_packed_sequence(folder: Path, packing: str, micro_batch_size: int) -> None:
    """Rows of two sequences hold what two rows of one hold, one after the other."""
    singles = train(stage(folder, packing, train={"micro_batch_size": 1}), 8)
    rows = train(stage(folder, packing, train={"micro_batch_size": micro_batch_size}), 8 // micro_batch_size)
    assert [part for row in rows for part in documents(row)] == [part for row in singles for part in documents(row)]
    for single in singles:
        assert single.cu_seqlens[-1] <= SEQ
        assert all(tokens for tokens, _, _ in documents(single))


def test_concat_fills_every_sequence(folder: Path) -> None:
    assert all(batch.cu_seqlens[-1] == SEQ for batch in train(stage(folder, "concat"), 100))


def test_best_fit_keeps_short_documents_whole(folder: Path) -> None:
    short = {tuple(document) for document in ONE + TWO if len(document) <= SEQ}
    seen = {tuple(tokens) for batch in train(stage(folder), 400) for tokens, _, _ in documents(batch)}
    assert short <= seen


def test_batches_move_to_a_device(folder: Path) -> None:
    batch = train(stage(folder), 1)[0]
    assert batch.to("meta").loss_mask.device.type == "meta"
    assert equal(batch.to("cpu"), batch)


# Order and position


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
@pytest.mark.parametrize("consumed", [1, 4, 37, 160])
def test_going_on_from_any_position_equals_an_unbroken_run(folder: Path, packing: str, consumed: int) -> None:
    unbroken = train(stage(folder, packing), consumed + 12)
    resumed = train(stage(folder, packing), 12, consumed)
    assert all(map(equal, unbroken[consumed:], resumed))


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_the_global_order_does_not_depend_on_the_ranks(folder: Path, micro_batch_size: int) -> None:
    config = stage(folder, train={"micro_batch_size": micro_batch_size})
    alone = train(config, 12, consumed=8)
    ranks = [train(config, 6, 8, dp_rank=rank, dp_size=2) for rank in range(2)]
    assert all(map(equal, alone, itertools.chain(*zip(*ranks, strict=True))))


def test_far_positions_cost_nothing(folder: Path) -> None:
    assert len(train(stage(folder), 2, consumed=10**12)) == 2


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
def test_weights_are_met_in_tokens(folder: Path, packing: str) -> None:
    """Set `three` is made of a token of its own, in documents that leave room unused in best-fit packing."""
    tokens = [0, 0]
    tokenizer = fake_tokenizer(folder / "tokenizer.model", VOCAB)
    tiny_set(folder / "one", [[5] * 9 + [6] * 5] * 40, tokenizer)
    tiny_set(folder / "three", [[60] * 9 for _ in range(50)], tokenizer)
    write_blend(folder / "train.yaml", [{"set": "one", "weight": 3}, {"set": "three", "weight": 7}])
    for batch in train(stage(folder, packing), 3000):
        for part, _, _ in documents(batch):
            tokens[part[0] == 60] += len(part)
    assert tokens[1] / sum(tokens) == pytest.approx(0.7, abs=0.01)


def test_every_batch_has_the_mixture(folder: Path) -> None:
    """The sets are spread evenly: no run of one of them."""
    write_blend(folder / "train.yaml", [{"set": "one", "weight": 1}, {"set": "two", "weight": 1}])
    data = StageData(stage(folder, "concat"))
    places = [data._train.place(n)[0] for n in range(400)]
    assert all(sum(places[n : n + 4]) == 2 for n in range(0, 400, 4))


def test_tiny_weights_are_served(folder: Path) -> None:
    write_blend(folder / "train.yaml", [{"set": "one", "weight": 1}, {"set": "two", "weight": 1e-9}])
    data = StageData(stage(folder, "concat"))
    assert sum(data._train.place(n)[0] for n in range(2**17)) == 2


def test_sources_say_what_the_stage_takes(folder: Path) -> None:
    one, two = StageData(stage(folder, "concat")).sources()
    assert (one.name, two.name) == ("one", "two")
    assert (one.share, two.share, one.fill) == (0.75, 0.25, 1.0)
    assert one.tokens == sum(map(len, ONE))
    assert one.epochs == pytest.approx(300 * SEQ / one.tokens)


# Validation


def test_validation_is_the_same_at_every_call(folder: Path) -> None:
    data = StageData(stage(folder, train={"eval_batches": 2}))
    first = data.valid_batches()
    assert len(first) == 8
    assert all(map(equal, first, data.valid_batches()))


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
def test_short_validation_data_is_used_once(folder: Path, packing: str) -> None:
    batches = StageData(stage(folder, packing, train={"eval_batches": 100, "micro_batch_size": 2})).valid_batches()
    tokens = [token for batch in batches for part, _, _ in documents(batch) for token in part]
    assert Counter(tokens) == Counter(token for document in TWO for token in document)
    assert all(batch.tokens.shape == (1, 2 * SEQ) for batch in batches)


# Fingerprint


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: write_blend(
            folder / "train.yaml", [{"set": "one", "weight": 0.7}, {"set": "two", "weight": 0.25}]
        ),
        lambda folder: write_blend(
            folder / "train.yaml", [{"set": "two", "weight": 0.75}, {"set": "one", "weight": 0.25}]
        ),
        lambda folder: tiny_set(folder / "two", TWO[1:], fake_tokenizer(folder / "tokenizer.model", VOCAB), shards=2),
        lambda folder: {"seed": 99},
        lambda folder: {"packing": "concat"},
        lambda folder: {"seq_length": 32},
    ],
    ids=["weight", "order of sets", "content", "seed", "packing", "seq_length"],
)
def test_the_fingerprint_follows_what_decides_the_order(folder: Path, change: Callable[[Path], Any]) -> None:
    before = StageData(stage(folder)).fingerprint
    overrides = change(folder)
    after = StageData(stage(folder, **(overrides if isinstance(overrides, dict) else {}))).fingerprint
    assert before != after


def test_the_fingerprint_stays_where_nothing_of_the_order_changes(folder: Path) -> None:
    before = StageData(stage(folder)).fingerprint
    write_blend(folder / "valid.yaml", [{"set": "one", "weight": 1}])
    (folder / "train.yaml").rename(folder / "moved.yaml")
    (folder / "train.yaml").symlink_to(folder / "moved.yaml")
    assert StageData(stage(folder, train={"micro_batch_size": 2, "tokens": 800 * SEQ})).fingerprint == before


# Wrong input


def assert_refused(folder: Path, *parts: str, **overrides: Any) -> None:
    with pytest.raises(ConfigError) as error:
        StageData(stage(folder, **overrides))
    for part in parts:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("entries", "parts"),
    [
        ([{"set": "one", "weigth": 1}], ["entry 1", "unknown key 'weigth'", "set, weight, epochs"]),
        ([{"set": "one", "weight": 1}, {"set": "two"}], ["entry 2", "weight is missing"]),
        ([{"weight": 1}], ["set is missing"]),
        ([{"set": "one", "weight": 0}], ["weight=0 must be a number above 0"]),
        ([{"set": "one", "weight": "much"}], ["weight='much'"]),
        ([{"set": "one", "weight": True}], ["weight=True"]),
        ([{"set": "one", "weight": float("nan")}], ["weight=nan"]),
        ([{"set": "one", "weight": 10**400}], ["weight=1000"]),
        ([{"set": "one", "weight": 1, "epochs": -1}], ["epochs=-1"]),
        ([{"set": 7, "weight": 1}], ["set=7"]),
        (["one"], ["entry 1", "'one'"]),
        ([], ["expected a list of entries"]),
    ],
)
def test_wrong_blends(folder: Path, entries: list[Any], parts: list[str]) -> None:
    write_blend(folder / "train.yaml", entries)
    assert_refused(folder, "data.train_blend=", "train.yaml", *parts)


def test_a_missing_blend(folder: Path) -> None:
    (folder / "valid.yaml").unlink()
    assert_refused(folder, "data.valid_blend=", "valid.yaml", "prepare the data first")


def test_a_blend_that_is_not_yaml(folder: Path) -> None:
    (folder / "train.yaml").write_text("- {set: one, set: two, weight: 1}")
    assert_refused(folder, "train.yaml", "'set' is given twice")


def test_a_missing_set(folder: Path) -> None:
    write_blend(folder / "train.yaml", [{"set": "three", "weight": 1}])
    assert_refused(folder, "data.train_blend=", "three/set.json is missing", "prepare the data again")


def test_a_truncated_shard(folder: Path) -> None:
    path = folder / "one" / "one-00001-of-00002.bin"
    path.write_bytes(path.read_bytes()[:-2])
    assert_refused(folder, "data.train_blend=", "one-00001-of-00002.bin", "truncated")


def test_swapped_shards(folder: Path) -> None:
    tokenizer = fake_tokenizer(folder / "tokenizer.model", VOCAB)
    tiny_set(folder / "one", [[5, 6, 2], [7, 8, 2]], tokenizer, shards=2)
    first, second = (folder / "one" / f"one-0000{shard}-of-00002.bin" for shard in range(2))
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    assert_refused(folder, "one-00000-of-00002.bin: content differs", "swapped")


def test_an_edited_manifest(folder: Path) -> None:
    path = folder / "two" / "two-00000-of-00001.manifest.json"
    path.write_text(path.read_text().replace('"documents": 30', '"documents": 29'))
    assert_refused(folder, "two-00000-of-00001.manifest.json", "changed")


def test_another_tokenizer(folder: Path) -> None:
    fake_tokenizer(folder / "tokenizer.model", VOCAB, b"another tokenizer")
    assert_refused(folder, "one", "another tokenizer", "data.tokenizer=")


def test_a_missing_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.model").unlink()
    assert_refused(folder, "data.tokenizer=", "tokenizer.model", "No such file")


def test_a_vocabulary_larger_than_the_models(folder: Path) -> None:
    assert_refused(
        folder, "61 ids", "model.vocab_size is 60", "one", "raise model.vocab_size", model={"vocab_size": 60}
    )
    advice = "; prepare the text with the tokenizer of init_from.stage='start'"
    assert_refused(folder, "model.vocab_size is 60" + advice, model={"vocab_size": 60}, init_from={"stage": "start"})


def test_more_epochs_than_allowed(folder: Path) -> None:
    entries: list[dict[str, Any]] = [{"set": "one", "weight": 0.75}, {"set": "two", "weight": 0.25, "epochs": 2}]
    write_blend(folder / "train.yaml", entries)
    epochs = 100 * SEQ / sum(map(len, TWO))
    assert_refused(folder, "two", f"{epochs:.2f} epochs", "epochs=2 is allowed", packing="concat")
    entries[1]["epochs"] = 100
    write_blend(folder / "train.yaml", entries)
    StageData(stage(folder, packing="concat"))


@pytest.mark.parametrize("weight", [5e-324, 1.7e308])
def test_the_smallest_and_largest_weights_are_shares_like_others(folder, weight):
    write_blend(folder / "train.yaml", [{"set": name, "weight": weight} for name in ("one", "two")] * 200)
    sources = StageData(stage(folder, "concat")).sources()
    assert sum(source.share for source in sources) == pytest.approx(1)
    assert all(source.share == pytest.approx(1 / 400, rel=0.01) for source in sources)


@pytest.mark.parametrize("key", ["train", "valid"])
@pytest.mark.parametrize(("documents", "masks"), [([[2]] * 9, None), ([[5, 6, 2]] * 9, [[0, 0, 0]] * 9)])
def test_a_set_without_a_loss_is_refused(folder, key, documents, masks):
    tiny_set(folder / "empty", documents, fake_tokenizer(folder / "tokenizer.model", VOCAB), masks)
    write_blend(folder / f"{key}.yaml", [{"set": "one", "weight": 1}, {"set": "empty", "weight": 1}])
    with pytest.raises(ConfigError, match="empty holds nothing to learn"):
        StageData(stage(folder))
