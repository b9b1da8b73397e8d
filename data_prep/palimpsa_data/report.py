"""What came of a job: documents, tokens, what was left out and why, lengths, shares; text, JSON and a picture."""

from __future__ import annotations

import dataclasses
import io
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from palimpsa_data.files import json_bytes, write_atomically
from palimpsa_data.indexed import read_index
from palimpsa_data.lengths import BUCKETS
from palimpsa_data.shards import Manifest, output_path

_MOST_SOURCES = 20


@dataclass(frozen=True)
class Report:
    """Sums over shards. `sources` has documents and tokens of each, most tokens first; lengths are in tokens.

    `lengths` counts documents by the shortest length of their bucket (see `lengths.BUCKETS`).
    """

    name: str
    shards: int
    documents: int
    tokens: int
    trained_tokens: int
    input_bytes: int
    text_bytes: int
    output_bytes: int
    shortest: int
    median: float
    longest: int
    damaged: int
    skipped: dict[str, int]
    sources: dict[str, list[int]]
    lengths: dict[int, int]

    def text(self) -> str:
        """For people."""
        trained = f", {self.trained_tokens:,} of them trained on" if self.trained_tokens != self.tokens else ""
        lines = [
            f"{self.name}: {_count(self.documents, 'document')}, {self.tokens:,} tokens{trained}, "
            f"in {_count(self.shards, 'shard')}",
            f"bytes: {_size(self.input_bytes)} read, {_size(self.text_bytes)} of text kept, "
            f"{_size(self.output_bytes)} written",
            f"tokens a document: shortest {self.shortest:,}, median {self.median:,.0f}, longest {self.longest:,}",
            f"left out: {_count(sum(self.skipped.values()), 'row')}, {self.damaged:,} of them damaged",
            *(f"  {count:>12,}  {reason}" for reason, count in self.skipped.items()),
            "shares of the tokens:",
        ]
        shown = list(self.sources.items())[:_MOST_SOURCES]
        for source, (documents, tokens) in shown:
            lines.append(f"  {tokens / self.tokens:>12.2%}  {source or '-'} ({_count(documents, 'document')})")
        if rest := len(self.sources) - len(shown):
            lines.append(f"  and {rest:,} more sources, in report.json")
        return "\n".join(lines) + "\n"


def report_on(name: str, shards: Mapping[Path, Manifest]) -> Report:
    """Sum up finished shards (stem -> manifest)."""
    manifests = list(shards.values())
    skipped: Counter[str] = Counter()
    lengths: Counter[int] = Counter()
    sources: dict[str, list[int]] = {}
    for manifest in manifests:
        skipped.update(manifest.skipped)
        lengths.update({int(shortest): count for shortest, count in manifest.lengths.items()})
        for source, (documents, tokens) in manifest.sources.items():
            entry = sources.setdefault(source, [0, 0])
            entry[0] += documents
            entry[1] += tokens
    filled = [manifest for manifest in manifests if manifest.documents]
    return Report(
        name=name,
        shards=len(shards),
        documents=sum(manifest.documents for manifest in manifests),
        tokens=sum(manifest.tokens for manifest in manifests),
        trained_tokens=sum(manifest.trained_tokens for manifest in manifests),
        input_bytes=sum(manifest.spec.input_bytes for manifest in manifests),
        text_bytes=sum(manifest.text_bytes for manifest in manifests),
        output_bytes=sum(file["bytes"] for manifest in manifests for file in manifest.outputs.values()),
        shortest=min((manifest.shortest for manifest in filled), default=0),
        median=_median(shards),
        longest=max((manifest.longest for manifest in filled), default=0),
        damaged=sum(manifest.damaged for manifest in manifests),
        skipped=dict(skipped.most_common()),
        sources=dict(sorted(sources.items(), key=lambda item: (-item[1][1], item[0]))),
        lengths=dict(sorted(lengths.items())),
    )


def write_report(folder: Path, report: Report) -> None:
    """Write report.txt, report.json and lengths.png into `folder`, unless they are there."""
    content = json_bytes(dataclasses.asdict(report))
    text, record, picture = (folder / name for name in ("report.txt", "report.json", "lengths.png"))
    if picture.is_file() and _holds(record, content) and _holds(text, report.text().encode()):
        return
    write_atomically(text, report.text().encode())
    write_atomically(picture, _picture(report))
    write_atomically(record, content)


def _holds(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content


def _median(shards: Mapping[Path, Manifest]) -> float:
    lengths = [read_index(output_path(stem, ".idx")).lengths for stem in shards]
    together = np.concatenate([np.zeros(0, np.int32), *lengths])
    return float(np.median(together)) if together.size else 0.0


def _picture(report: Report) -> bytes:
    """A PNG: documents, and the tokens in them, by document length."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # late: half a second
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    lows = np.array(list(report.lengths) or [1], np.float64)
    counts = np.array(list(report.lengths.values()) or [0], np.float64)
    highs = np.append(BUCKETS, 2 * BUCKETS[-1])[np.searchsorted(BUCKETS, lows) + 1].astype(np.float64)
    tokens = counts * np.sqrt(lows * highs)
    for shares, colour, label in ((counts, "#0072B2", "documents"), (tokens, "#D55E00", "their tokens")):
        share = 100 * shares / max(shares.sum(), 1)
        axes.bar(lows, share, highs - lows, align="edge", color=colour, alpha=0.55, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens in a document")
    axes.set_ylabel("% of all")
    axes.set_title(f"{report.name}: {report.documents:,} documents, {report.tokens:,} tokens", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _size(count: int) -> str:
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
