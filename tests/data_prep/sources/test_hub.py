"""Names on the hub, with `datasets` answering from memory in the hub's place."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
from palimpsa_data import DataError
from palimpsa_data.documents import Document
from palimpsa_data.sources import FineWebOptions, find_inputs, read


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    """What the hub was asked for; it holds ten documents in three files."""
    asked: list[tuple[Any, ...]] = []
    rows = datasets.Dataset.from_dict({"text": [f"document {n}" for n in range(10)], "extra": list(range(10))})

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool, revision: str) -> Any:
        asked.append((name, config, split, streaming, revision))
        dataset = rows.to_iterable_dataset(num_shards=3)
        dataset.info.download_size = 301
        return dataset

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, name: types.SimpleNamespace(sha="abc"))
    monkeypatch.chdir(tmp_path)
    return asked


def test_a_hub_name_is_as_many_inputs_as_it_has_files(asked: list[tuple[Any, ...]]) -> None:
    found = find_inputs(["org/name:sample-10BT"])
    assert [item.name for item in found] == [f"org/name:sample-10BT/0000{n}-of-00003" for n in range(3)]
    assert len({item.sha256() for item in found}) == 3
    assert [item.bytes for item in found] == [100] * 3
    done: list[int] = []
    documents = [list(read(item, FineWebOptions(), done.append)) for item in found]
    assert done == [100] * 3
    assert [item for part in documents for item in part] == [
        Document(f"document {n}", "name:sample-10BT") for n in range(10)
    ]
    assert [len(part) for part in documents] == [4, 3, 3]
    assert set(asked) == {("org/name", "sample-10BT", "train", True, "abc")}


def test_a_column_that_the_hub_does_not_have_is_refused(asked: list[tuple[Any, ...]]) -> None:
    with pytest.raises(DataError, match="has no column score or int_score"):
        list(read(find_inputs(["org/name"])[0], FineWebOptions(min_score=1), lambda _: None))


def test_what_lies_here_comes_first(asked: list[tuple[Any, ...]], tmp_path: Path) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "x.jsonl").write_text('{"text": "here"}\n')
    (item,) = find_inputs(["org/name"])
    assert list(read(item, FineWebOptions(), lambda _: None)) == [Document("here", "x")]
    assert not asked


@pytest.mark.parametrize("pattern", ["data/train.parquet", "a/b/c", "name", "org/*", "./org/name", "data/x.jsonl.gz"])
def test_paths_are_not_asked_for_on_the_hub(asked: list[tuple[Any, ...]], pattern: str) -> None:
    with pytest.raises(DataError, match="there is no such file or folder"):
        find_inputs([pattern])
    assert not asked


def test_a_hub_that_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(DataError, match=r"org/name: nothing here has this name, and the hub says: .*[Rr]efused"):
        find_inputs(["org/name"])


def _client_error() -> Exception:
    """What huggingface_hub's own client raises without a network."""
    try:
        huggingface_hub.get_session().get("http://127.0.0.1:9")
    except Exception as error:
        return error
    raise AssertionError("somebody listens there")


@pytest.mark.parametrize(
    ("error", "reason"), [(ConnectionError("reset by peer"), "reset by peer"), (_client_error(), ".*refused")]
)
def test_a_stream_that_breaks_off_is_said(
    error: Exception, reason: str, asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, *_) = find_inputs(["org/name"])

    def broken(name: str, config: str | None, **_: Any) -> Any:
        def rows() -> Any:
            yield {"text": "one"}
            raise error

        return datasets.IterableDataset.from_generator(rows)

    monkeypatch.setattr(datasets, "load_dataset", broken)
    with pytest.raises(DataError, match=rf"org/name/00000-of-00003: the hub's stream broke off \({reason}\); run"):
        list(read(first, FineWebOptions(), lambda _: None))
