"""FineWeb: what is kept, what is left out and why, what an impossible filter says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.data_fixtures import LITERAL_EOD, fineweb_rows, write_array, write_fineweb, write_lines, write_parquet
from helpers.sources import items, skipped, texts
from palimpsa_data import DataError
from palimpsa_data.documents import Document
from palimpsa_data.sources import FineWebOptions

ALL = ["The first document.", LITERAL_EOD, "Ein Satz über Öfen.", "Low.", "Unscored.", "Another dump."]
NO_TEXT = {"null text": 1, "empty text": 2}


@pytest.fixture(params=["x.parquet", "x.jsonl.zst", "x.json"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / request.param
    if path.suffix == ".parquet":
        return write_fineweb(path)
    return (write_array if path.suffix == ".json" else write_lines)(path, fineweb_rows())


@pytest.mark.parametrize(
    ("filters", "left_out"),
    [
        ({}, {}),
        ({"min_score": 3}, {"Low.": "score below 3", "Unscored.": "no score"}),
        ({"languages": ("en",)}, {"Ein Satz über Öfen.": "language is not en"}),
        ({"languages": ("EN", "de")}, {}),
        (
            {"min_language_score": 0.9},
            {"Ein Satz über Öfen.": "language score below 0.9", "Unscored.": "no language score"},
        ),
        ({"min_length": 5}, {"Low.": "shorter than 5 characters"}),
        ({"max_length": 20}, {LITERAL_EOD: "longer than 20 characters"}),
    ],
)
def test_filters(path: Path, filters: dict[str, Any], left_out: dict[str, str]) -> None:
    found = items(path, FineWebOptions(**filters))
    assert texts(found) == [text for text in ALL if text not in left_out]
    reasons = dict.fromkeys(left_out.values(), 0)
    for reason in left_out.values():
        reasons[reason] += 1
    assert skipped(found) == {**NO_TEXT, **reasons}


def test_shares_are_counted_by_dump(path: Path, tmp_path: Path) -> None:
    sources = [item.source for item in items(path, FineWebOptions()) if isinstance(item, Document)]
    assert sources == ["CC-MAIN-2024-10"] * 5 + ["CC-MAIN-2019-04"]
    bare = write_parquet(tmp_path / "train-7.parquet", [{"text": "Text is all that is sure."}])
    assert items(bare, FineWebOptions()) == [Document("Text is all that is sure.", "train-7")]


def test_int_score_serves_where_there_is_no_score(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", [{"text": "a", "int_score": 2}, {"text": "b", "int_score": 3}])
    assert texts(items(path, FineWebOptions(min_score=2.5))) == ["b"]


@pytest.mark.parametrize(
    ("filters", "column"),
    [
        ({"min_score": 3}, "score or int_score"),
        ({"languages": ("en",)}, "language"),
        ({"min_language_score": 0.5}, "language_score"),
    ],
)
@pytest.mark.parametrize("write", [write_parquet, write_lines])
def test_a_filter_without_its_column_is_refused(
    tmp_path: Path, filters: dict[str, Any], column: str, write: Any
) -> None:
    path = write(tmp_path / ("x.parquet" if write is write_parquet else "x.jsonl"), [{"text": "a", "id": "1"}])
    with pytest.raises(DataError, match=rf"{path.name} has no column {column}; its columns are text, id"):
        items(path, FineWebOptions(**filters))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"min_length": 0}, "--min-length must be at least 1, not 0"),
        ({"min_length": 9, "max_length": 8}, "--max-length 8 is below --min-length 9"),
        ({"min_score": float("nan")}, "--min-score must be a number, not nan"),
        ({"min_language_score": 95}, "--min-language-score must be from 0 to 1, not 95"),
        ({"languages": ("English",)}, "--languages takes codes .* such as en or deu, not 'English'"),
    ],
)
def test_impossible_options_say_what_is_possible(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        FineWebOptions(**wrong)


@pytest.mark.parametrize("language", ["en", "deu", "zh-Hans", "deu_Latn"])
def test_language_codes_of_all_versions(language: str, tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", [{"text": code, "language": code} for code in (language, "xx")])
    assert texts(items(path, FineWebOptions(languages=(language,)))) == [language]


def test_strict_ends_at_the_first_damaged_row(path: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"{path.name}: null text, after 1 good rows"):
        items(path, FineWebOptions(strict=True))
    filtered = write_parquet(tmp_path / "y.parquet", [{"text": "too long"}, {"text": "ok"}])
    assert texts(items(filtered, FineWebOptions(strict=True, max_length=2))) == ["ok"]


def test_a_huge_document_goes_through(tmp_path: Path) -> None:
    huge = "A sentence of a huge document. " * 170_000
    for path in (
        write_parquet(tmp_path / "x.parquet", [{"text": "small"}, {"text": huge}, {"text": "small"}]),
        write_array(tmp_path / "x.json", [{"text": "small"}, {"text": huge}, {"text": "small"}]),
        write_lines(tmp_path / "x.jsonl", [{"text": "small"}, {"text": huge}, {"text": "small"}]),
    ):
        assert texts(items(path, FineWebOptions())) == ["small", huge, "small"]
