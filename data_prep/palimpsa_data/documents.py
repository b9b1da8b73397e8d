"""What the sources give: whole documents, question and answer, or the reason why something was left out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """A text to train on whole. `source` is what shares are counted by: a dump, a language, a file's name."""

    text: str
    source: str = ""


@dataclass(frozen=True)
class Example:
    """A prompt and its answer, which alone is trained on; the prompt is head, context and tail, nothing between.

    `context` may be shortened where the whole is too long (LongAlpaca asks its question after the document, so what
    goes is taken from the context alone); head, tail and answer stay whole.
    """

    head: str
    context: str
    tail: str
    answer: str
    source: str = ""

    @property
    def prompt(self) -> str:
        return self.head + self.context + self.tail


@dataclass(frozen=True)
class Skipped:
    """Something left out; manifest and report count the reasons, so these are few and name no single row.

    `damaged`: the row itself is broken (not JSON, not UTF-8, null), where others are only not wanted (filters).
    """

    reason: str
    damaged: bool = False


Item = Document | Example | Skipped
