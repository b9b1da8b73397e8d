"""Records that were edited or damaged: one message that names the file, whatever stands where a value should."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.datasets import tiny_set
from helpers.jobs import fineweb_job
from palimpsa_data import DataError
from palimpsa_data.jobs import run_job
from palimpsa_data.merge import job_status
from palimpsa_data.records import RecordError, from_json
from palimpsa_data.sets import SetReader, ShardEntry, TokenizerInfo, find_problems
from palimpsa_data.shards import check_shard

_WRONG = [None, -1, "x", [], {}, [1], {"a": 1}, 1e300, True, 10**30, "../x", "a\0b"]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def edited(value: Any) -> Iterator[Any]:
    """The record with each of its parts exchanged for each wrong value, or left out."""
    for path in places(value):
        for wrong in _WRONG:
            whole = [copy.deepcopy(value)]
            part: Any = whole
            for key in (0, *path)[:-1]:
                part = part[key]
            part[(0, *path)[-1]] = wrong
            yield whole[0]
            if path:
                del part[path[-1]]
                yield whole[0]


def check_set_and_shard(folder: Path) -> None:
    check_shard(folder / "s-00000-of-00002", checksums=False)
    SetReader(folder, checksums=False)


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("set.json", check_set_and_shard),
        ("s-00000-of-00002.manifest.json", check_set_and_shard),
        ("job.json", job_status),
    ],
)
def test_no_edit_of_a_record_gets_further_than_a_message(
    tmp_path: Path, name: str, check: Callable[[Path], object]
) -> None:
    if name == "job.json":
        run_job(fineweb_job(tmp_path, "s"))
    else:
        tiny_set(tmp_path / "s", [[5, 2], [6, 7, 2]], TokenizerInfo("0" * 64, 100, 2, 3), shards=2)
    path = tmp_path / "s" / name
    messages = []
    for record in edited(json.loads(path.read_bytes())):
        path.write_text(json.dumps(record))
        try:
            check(tmp_path / "s")
        except DataError as error:
            messages.append(str(error))
    assert len(messages) > 100
    assert all(str(tmp_path / "s") in message for message in messages)


def test_ids_that_training_would_take_from_a_set_are_checked(tmp_path: Path) -> None:
    tiny_set(tmp_path / "s", [[5, 2]], TokenizerInfo("0" * 64, 100, 2, 3))
    path = tmp_path / "s" / "set.json"
    path.write_text(path.read_text().replace('"pad_id": 3', '"pad_id": 100'))
    (problem,) = find_problems(tmp_path / "s")
    assert "set.json: eod_id or pad_id is outside the vocabulary" in problem


def test_what_is_wrong_is_named() -> None:
    good = {"name": "a", "manifest_sha256": "b", "documents": 1, "tokens": 2}
    assert from_json(ShardEntry, good) == ShardEntry("a", "b", 1, 2)
    for wrong, message in (
        ({**good, "tokens": True}, "tokens is True, not an integer"),
        ({**good, "extra": 1}, "'extra' is unknown"),
        ({"name": "a"}, "'documents' is missing"),
        ([], r"the record is \[\], not an object"),
    ):
        with pytest.raises(RecordError, match=message):
            from_json(ShardEntry, wrong)
