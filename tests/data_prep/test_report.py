"""Reports of shards that are unusual: many sources, nothing kept, no shard at all; the picture."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image
from palimpsa_data.documents import Skipped
from palimpsa_data.report import Report, report_on, write_report
from palimpsa_data.shards import Encoded, ShardSpec, shard_stem, write_shard

SPEC = ShardSpec("input", "tokenizer", "config", 100, loss_mask=False, input_name="a", input_bytes=2_500_000)


def report(folder: Path, *shards: list[Encoded | Skipped]) -> Report:
    manifests = {}
    for number, documents in enumerate(shards):
        stem = shard_stem(folder, "s", number, len(shards))
        manifests[stem], _ = write_shard(stem, documents, SPEC)
    return report_on("s", manifests)


def document(length: int, source: str = "web") -> Encoded:
    return Encoded(np.full(length, 7, np.int32), None, source, 4 * length)


def test_sums_over_shards(tmp_path: Path) -> None:
    skipped = [Skipped("too short")] * 3 + [Skipped("null text", damaged=True)]
    made = report(
        tmp_path, [document(5), document(60, "code"), *skipped], [document(1), document(20), Skipped("too short")]
    )
    assert (made.shards, made.documents, made.tokens, made.trained_tokens) == (2, 4, 86, 86)
    assert (made.shortest, made.median, made.longest) == (1, 12.5, 60)
    assert (made.input_bytes, made.text_bytes) == (5_000_000, 344)
    assert made.output_bytes == sum(
        path.stat().st_size for path in tmp_path.iterdir() if path.suffix in (".bin", ".idx")
    )
    assert (made.skipped, made.damaged) == ({"too short": 4, "null text": 1}, 1)
    assert made.sources == {"code": [1, 60], "web": [3, 26]}
    assert list(made.sources) == ["code", "web"]
    assert sum(made.lengths.values()) == 4
    text = made.text()
    assert "s: 4 documents, 86 tokens, in 2 shards" in text
    assert "5.0 MB read, 344 B of text kept" in text
    assert "shortest 1, median 12, longest 60" in text
    assert "left out: 5 rows, 1 of them damaged" in text
    assert "69.77%  code (1 document)" in text


def test_of_many_sources_the_largest_are_shown(tmp_path: Path) -> None:
    made = report(tmp_path, [document(100 - number, f"source {number}") for number in range(25)])
    assert len(made.sources) == 25
    lines = made.text().splitlines()
    assert next(line.split("  ")[-1] for line in lines if "source 1" in line) == "source 1 (1 document)"
    assert "source 20 " not in made.text()
    assert lines[-1] == "  and 5 more sources, in report.json"


@pytest.mark.parametrize("shards", [[], [[Skipped("empty text")]]])
def test_nothing_kept(tmp_path: Path, shards: list[list[Encoded | Skipped]]) -> None:
    made = report(tmp_path, *shards)
    assert (made.documents, made.tokens, made.shortest, made.median, made.longest) == (0, 0, 0, 0.0, 0)
    assert "0 documents, 0 tokens" in made.text()


def test_the_picture_shows_where_the_documents_are(tmp_path: Path) -> None:
    """Blue columns where the short documents are, orange ones where the tokens are."""
    made = report(tmp_path, [*[document(16)] * 90, document(5000)])
    write_report(tmp_path, made)
    pixels = image.imread(io.BytesIO((tmp_path / "lengths.png").read_bytes()))[..., :3]
    blue = np.argwhere((pixels[..., 2] - pixels[..., 0]) > 0.3)[:, 1]
    orange = np.argwhere((pixels[..., 0] - pixels[..., 2]) > 0.3)[:, 1]
    assert np.median(blue) < pixels.shape[1] / 2 < np.median(orange)
    assert json.loads((tmp_path / "report.json").read_text())["lengths"] == {str(k): v for k, v in made.lengths.items()}


def test_an_unchanged_report_is_not_written_again(tmp_path: Path) -> None:
    made = report(tmp_path, [document(16)])
    files = [tmp_path / name for name in ("report.txt", "report.json", "lengths.png")]
    write_report(tmp_path, made)
    before = [path.stat().st_mtime_ns for path in files]
    write_report(tmp_path, made)
    assert [path.stat().st_mtime_ns for path in files] == before
    files[0].write_text("changed")
    write_report(tmp_path, made)
    assert files[0].read_text() == made.text()
