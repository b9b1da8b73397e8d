"""Values of rows to texts: what is no text, or of an unwanted length, comes back as the reason."""

from __future__ import annotations

from typing import Any

from palimpsa_data.documents import Document, Skipped
from palimpsa_data.sources.options import TextLengths


def checked_text(value: Any, name: str) -> str | Skipped:
    """The text that a field `name` of a row holds; bytes are taken for UTF-8."""
    if value is None:
        return Skipped(f"null {name}", damaged=True)
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError:
            return Skipped(f"{name} is not UTF-8", damaged=True)
    if not isinstance(value, str):
        return Skipped(f"{name} is not a string", damaged=True)
    if not value or value.isspace():
        return Skipped(f"empty {name}")
    return value


def document(text: str | Skipped, source: str, options: TextLengths) -> Document | Skipped:
    """The text as a document if its length is as asked."""
    if isinstance(text, Skipped):
        return text
    if len(text) < options.min_length:
        return Skipped(f"shorter than {options.min_length} characters")
    if options.max_length is not None and len(text) > options.max_length:
        return Skipped(f"longer than {options.max_length} characters")
    return Document(text, source)
