"""JSON text in blocks of any size: what is read equals json.loads, what is broken costs one row."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from helpers.data_fixtures import write_array, write_bytes, write_lines
from palimpsa_data import DataError
from palimpsa_data.sources import streams
from palimpsa_data.sources.streams import BadRow, array_rows, json_rows, line_rows

ROWS: list[dict[str, Any]] = [
    {"text": "plain", "n": 1},
    {"text": 'quotes " and \\ and }, { in it', "list": [{"a": [1, 2.5e3, None]}, {}]},
    {"text": "Öfen, 日本, \U0001f600, \u2028, \x00"},
    {},
    {"text": "x" * 3000, "deep": {"er": {"still": True}}},
]


def blocks(content: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(content), size):
        yield content[start : start + size]


@pytest.fixture
def window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Size of the blocks, and of what an array's reader takes in at a time."""
    monkeypatch.setattr(streams, "_BLOCK", request.param)
    return request.param


windows = pytest.mark.parametrize("window", [1, 2, 7, 100, 10**6], indirect=True)


def read(path: Path) -> list[Any]:
    return list(json_rows(path, lambda _: None))


@windows
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("indent", [None, 2])
def test_arrays_are_read_whatever_the_blocks(window: int, ascii_only: bool, indent: int | None) -> None:
    content = json.dumps(ROWS, ensure_ascii=ascii_only, indent=indent).encode()
    assert list(array_rows(blocks(content, window))) == ROWS


@windows
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\n\n \n"])
def test_lines_are_read_whatever_the_blocks(window: int, end: bytes) -> None:
    content = end.join(json.dumps(row, ensure_ascii=False).encode() for row in ROWS)
    assert list(line_rows(blocks(content, window))) == ROWS
    assert list(line_rows(blocks(content + end, window))) == ROWS


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("marked", [b"", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n  "])
def test_the_first_character_says_whether_it_is_an_array(tmp_path: Path, suffix: str, marked: bytes) -> None:
    array = write_bytes(tmp_path / f"x.json{suffix}", marked + json.dumps(ROWS).encode())
    lines = write_bytes(
        tmp_path / f"y.json{suffix}", marked + b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
    )
    assert read(array) == ROWS
    assert read(lines) == ROWS


def test_compression_is_told_by_content_not_by_name(tmp_path: Path) -> None:
    content = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
    for packed in (gzip.compress(content), zstandard.compress(content), content):
        path = tmp_path / "x.jsonl.gz"
        path.write_bytes(packed)
        assert read(path) == ROWS


def test_compressed_parts_follow_each_other(tmp_path: Path) -> None:
    lines = [json.dumps(row).encode() + b"\n" for row in ROWS]
    for name, pack in (("x.jsonl.gz", gzip.compress), ("x.jsonl.zst", zstandard.compress)):
        (tmp_path / name).write_bytes(b"".join(pack(line) for line in lines))
        assert read(tmp_path / name) == ROWS


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_what_precedes_a_cut_is_kept(tmp_path: Path, suffix: str) -> None:
    """Cut anywhere, a file gives a beginning of its rows and says once that it ends early."""
    noise = random.Random(0)
    rows = [{"text": str(noise.random())} for _ in range(20_000)]
    whole = write_lines(tmp_path / f"x.jsonl{suffix}", rows).read_bytes()
    kept = []
    for share in (0.3, 0.7, 0.9):
        path = tmp_path / f"cut.jsonl{suffix}"
        path.write_bytes(whole[: int(len(whole) * share)])
        *found, last = read(path)
        assert last == BadRow(f"{'gzip' if suffix == '.gz' else 'zstd'} ends early")
        assert found == rows[: len(found)]
        kept.append(len(found))
    assert kept == sorted(kept)
    # zstd gives whole blocks of 128 KiB, gzip everything.
    assert kept[-1] > 20_000 * (0.85 if suffix == ".gz" else 0.5)
    path.write_bytes(whole[:-1])
    assert read(path)[-1] == BadRow(f"{'gzip' if suffix == '.gz' else 'zstd'} ends early")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_damage_in_a_compressed_file_is_counted(tmp_path: Path, suffix: str) -> None:
    path = write_lines(tmp_path / f"x.jsonl{suffix}", [{"n": 1}])
    path.write_bytes(path.read_bytes() + b"garbage")
    assert read(path) == [{"n": 1}, BadRow(f"{'gzip' if suffix == '.gz' else 'zstd'} is damaged")]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_of_no_bytes_is_damaged(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"x.jsonl{suffix}").write_bytes(b"")
    assert read(tmp_path / f"x.jsonl{suffix}") == [BadRow("compressed file of no bytes")]


def test_zstd_may_begin_with_a_frame_to_skip(tmp_path: Path) -> None:
    """As pzstd writes it."""
    packed = zstandard.compress(b"".join(json.dumps(row).encode() + b"\n" for row in ROWS))
    (tmp_path / "x.jsonl.zst").write_bytes(b"\x50\x2a\x4d\x18\x04\0\0\0size" + packed)
    assert read(tmp_path / "x.jsonl.zst") == ROWS


def test_zstd_of_a_window_larger_than_memory_is_no_damage(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "x.jsonl.zst").write_bytes(packer.compress(b'{"n": 1}\n') + packer.flush())
    with pytest.raises(DataError, match=r"x\.jsonl\.zst: .* window of more than 128 MiB; pack it without"):
        read(tmp_path / "x.jsonl.zst")


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


BROKEN_LINES = [
    ("not json", "not JSON"),
    ('{"text": "cut', "not JSON"),
    ("{'text': 'python'}", "not JSON"),
    (nested(100_000), "not JSON"),
    ('{"n": ' + "9" * 5000 + "}", "not JSON"),
    ("[1, 2]", "not a JSON object"),
    ('"a string"', "not a JSON object"),
    ("null", "not a JSON object"),
    (b'{"text": "caf\xe9"}', "not UTF-8"),
    ('{"text": "half \\ud83d"}', "half of a surrogate pair"),
    ('{"text": {"deep": ["\\uDE00"]}}', "half of a surrogate pair"),
]


@pytest.mark.parametrize(("broken", "reason"), BROKEN_LINES)
def test_a_broken_line_costs_itself_alone(tmp_path: Path, broken: Any, reason: str) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"n": 1}, broken, {"n": 2}])
    assert read(path) == [{"n": 1}, BadRow(reason), {"n": 2}]


def test_a_whole_surrogate_pair_is_a_character(tmp_path: Path) -> None:
    assert read(write_lines(tmp_path / "x.jsonl", ['{"text": "\\ud83d\\ude00"}'])) == [{"text": "\U0001f600"}]


BROKEN_ELEMENTS = [
    (b'{"text": "a" "b"}', "not JSON"),
    (b'{"text": nothing}', "not JSON"),
    (b'{"text": "an " unescaped quote"}', "not JSON"),
    (b'{"text": "a line\nbreak"}', "not JSON"),
    (b'{"n": ' + b"9" * 5000 + b"}", "not JSON"),
    (nested(100_000).encode(), "not JSON"),
    (b"17", "not a JSON object"),
    (b"-1.25e-17", "not a JSON object"),
    (b"false", "not a JSON object"),
    (b"[1, 2]", "not a JSON object"),
    (b'{"text": "caf\xe9"}', "not UTF-8"),
    (b'{"text": "half \\ud83d"}', "half of a surrogate pair"),
]


@windows
@pytest.mark.parametrize(("broken", "reason"), BROKEN_ELEMENTS)
def test_a_broken_element_costs_itself_alone(broken: bytes, reason: str, window: int) -> None:
    content = b'[{"n": 1}, ' + broken + b', {"n": 2},\n{"n": 3}]'
    assert list(array_rows(blocks(content, window))) == [{"n": 1}, BadRow(reason), {"n": 2}, {"n": 3}]
    last = b'[{"n": 1}, ' + broken + b"]"
    assert list(array_rows(blocks(last, window))) == [{"n": 1}, BadRow(reason)]


@windows
@pytest.mark.parametrize("rest", [b"", b",", b', {"n', b', {"n": "x', b', {"n": [1, {"m": 2}', b', {"n": "\\u12'])
def test_an_array_cut_anywhere_keeps_what_is_whole(rest: bytes, window: int) -> None:
    content = b'[{"n": 1}, {"n": 2}' + rest
    assert list(array_rows(blocks(content, window))) == [{"n": 1}, {"n": 2}, BadRow("array ends early")]


def test_what_follows_an_array_is_said() -> None:
    assert list(array_rows([b'[{"n": 1}] [{"n": 2}]'])) == [{"n": 1}, BadRow("text after the end of the array")]


@pytest.mark.parametrize("content", [b"", b"\n \n", b"[]", b" [ ] "])
def test_nothing_gives_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.json").write_bytes(content)
    assert read(tmp_path / "x.json") == []


def test_a_row_that_memory_could_not_hold_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_ROW_BYTES", 2**20)
    monkeypatch.setattr(streams, "_BLOCK", 1000)
    large = {"text": "x" * (3 * 2**20)}
    for path in (
        write_lines(tmp_path / "x.jsonl", [{"n": 1}, large, {"n": 2}]),
        write_array(tmp_path / "x.json", [{"n": 1}, large, {"n": 2}]),
    ):
        assert read(path) == [{"n": 1}, BadRow("row larger than 1 MiB"), {"n": 2}]


def test_a_large_row_is_not_parsed_over_and_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_BLOCK", 1000)
    attempts = 0
    decode = json.JSONDecoder.raw_decode

    def counted(self: Any, text: str, at: int) -> Any:
        nonlocal attempts
        attempts += 1
        return decode(self, text, at)

    monkeypatch.setattr(json.JSONDecoder, "raw_decode", counted)
    large = {"text": "x" * 2**20}
    assert list(array_rows(blocks(json.dumps([large]).encode(), 1000))) == [large]
    assert attempts < 15


@windows
def test_random_arrays_equal_json_loads(window: int) -> None:
    noise = random.Random(1)

    def value(depth: int) -> Any:
        kind = noise.randrange(7 if depth < 3 else 5)
        if kind == 5:
            return [value(depth + 1) for _ in range(noise.randrange(4))]
        if kind == 6:
            return {chr(noise.randrange(32, 1000)): value(depth + 1) for _ in range(noise.randrange(4))}
        text = "".join(chr(noise.choice([34, 92, 44, 93, 125, 233, 0x1F600, 10])) for _ in range(noise.randrange(9)))
        return [None, True, noise.random(), noise.randrange(-(10**9), 10**9), text][kind]

    for _ in range(200):
        rows = [{"v": value(0)} for _ in range(noise.randrange(6))]
        content = json.dumps(rows, ensure_ascii=noise.random() < 0.5).encode()
        assert list(array_rows(blocks(content, window))) == rows
