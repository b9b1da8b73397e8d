"""Bytes of source files to text, by the names that encoding detectors give."""

from __future__ import annotations

import codecs

from palimpsa_data.documents import Skipped

# Names of ICU and chardet that Python spells otherwise. The right-to-left variants differ in the order of display.
_ALIASES = {
    "ibm424_ltr": "cp424",
    "ibm424_rtl": "cp424",
    "iso-8859-8-e": "iso-8859-8",
    "iso-8859-8-i": "iso-8859-8",
    "windows-874": "cp874",
    "x-mac-cyrillic": "mac-cyrillic",
}


def decode(content: bytes, encoding: str | None) -> str | Skipped:
    """Text without its byte order mark; `encoding` None means UTF-8."""
    name = (encoding or "utf-8").strip().lower()
    try:
        codecs.lookup(_ALIASES.get(name, name))
        text = content.decode(_ALIASES.get(name, name))
        text.encode()
    except (LookupError, ValueError) as error:
        if isinstance(error, UnicodeError):
            return Skipped("content is not in its source encoding", damaged=True)
        return Skipped("source encoding that Python does not know", damaged=True)
    return text.removeprefix("\ufeff")
