"""What the tests of the sources ask again and again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from palimpsa_data.documents import Document, Item, Skipped
from palimpsa_data.sources import SourceOptions, find_inputs, read


def items(path: Path, options: SourceOptions) -> list[Item]:
    """Everything that the one input at `path` gives; its progress never goes back and ends with the whole input."""
    (source,) = find_inputs([str(path)], options.loose)
    seen: list[int] = []
    found = list(read(source, options, seen.append))
    assert seen == sorted(seen)
    assert seen[-1] == source.bytes
    return found


def texts(found: list[Item]) -> list[str]:
    return [item.text for item in found if isinstance(item, Document)]


def skipped(found: list[Item]) -> dict[str, int]:
    return dict(Counter(item.reason for item in found if isinstance(item, Skipped)))
