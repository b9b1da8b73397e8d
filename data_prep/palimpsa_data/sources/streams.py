"""JSON text of any size, compressed or not, to rows: one line a row, or the elements of one array.

Whatever is broken costs the row it is in: a `BadRow` takes its place and reading goes on behind it. What is held in
memory is one row and a block of the file.
"""

from __future__ import annotations

import codecs
import gzip
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from palimpsa_data.errors import DataError
from palimpsa_data.optional import optional_packages

MAX_ROW_BYTES = 128 * 2**20
_BLOCK = 2**20
# The densest zstd input expands some 30,000-fold, so blocks of it are small.
_ZSTD_BLOCK = 2**12
_GZIP_MAGIC = b"\x1f\x8b"
# A frame of data, or (as parallel packers write first) one to be skipped.
_ZSTD_MAGIC = re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")
# Longer than any literal of JSON and what may come between a number's digits.
_LOOK_AHEAD = 16
_SPACE = re.compile(r"[ \t\r\n]*")
_NEXT_ROW = re.compile(r"\}\s*,\s*(?=\{)")


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be read, and why; the reasons are few."""

    reason: str


class _DamagedStreamError(Exception):
    """The rest of a compressed file cannot be read."""


def read_blocks(path: Path, progress: Callable[[int], None]) -> Iterator[bytes]:
    """The file's content, decompressed where its first bytes say so; `progress` gets the bytes of the file read.

    Raises:
        _DamagedStreamError: after everything that could be read.
        DataError: a compressed file that takes more memory to read than there may be.
    """
    with path.open("rb") as file:
        magic = file.read(4)
        file.seek(0)
        if magic.startswith(_GZIP_MAGIC):
            blocks = _gzip_blocks(file)
        elif _ZSTD_MAGIC.fullmatch(magic):
            blocks = _zstd_blocks(file)
        elif not magic and path.suffix.lower() in (".gz", ".zst"):
            raise _DamagedStreamError("compressed file of no bytes")
        else:
            blocks = iter(lambda: file.read(_BLOCK), b"")
        for block in blocks:
            yield block
            progress(file.tell())


def _gzip_blocks(file: BinaryIO) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=file) as stream:
        while True:
            try:
                block = stream.read1(_BLOCK)
            except EOFError:
                raise _DamagedStreamError("gzip ends early") from None
            except (gzip.BadGzipFile, zlib.error):
                raise _DamagedStreamError("gzip is damaged") from None
            if not block:
                return
            yield block


def _zstd_blocks(file: BinaryIO) -> Iterator[bytes]:
    with optional_packages():
        import zstandard
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    rest = b""
    begun = False
    while block := rest or file.read(_ZSTD_BLOCK):
        if decompressor.eof:
            decompressor = zstandard.ZstdDecompressor().decompressobj()
        try:
            yield decompressor.decompress(block)
        except zstandard.ZstdError as error:
            if "too much memory" in str(error):
                raise DataError(
                    f"{file.name}: was packed with a window of more than 128 MiB; pack it without zstd's --long"
                ) from None
            raise _DamagedStreamError("zstd is damaged") from None
        rest = decompressor.unused_data if decompressor.eof else b""
        begun = not decompressor.eof
    if begun:
        raise _DamagedStreamError("zstd ends early")


def json_rows(path: Path, progress: Callable[[int], None]) -> Iterator[dict[str, Any] | BadRow]:
    """Rows of a file that is a JSON array of objects or holds one object a line; its first character says which."""
    blocks = read_blocks(path, progress)
    try:
        start = b""
        for block in blocks:
            start = (start + block).removeprefix(codecs.BOM_UTF8).lstrip()
            if len(start) >= len(codecs.BOM_UTF8):
                break
        yield from (array_rows if start.startswith(b"[") else line_rows)(itertools.chain([start], blocks))
    except _DamagedStreamError as damage:
        yield BadRow(str(damage))


def line_rows(blocks: Iterable[bytes]) -> Iterator[dict[str, Any] | BadRow]:
    """One row a line that is not blank."""
    for line in _lines(blocks):
        if isinstance(line, BadRow):
            yield line
        elif line and not line.isspace():
            yield _row(line)


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes | BadRow]:
    begun: list[bytes] = []
    size = 0
    for block in blocks:
        first, *others = block.split(b"\n")
        begun.append(first if size <= MAX_ROW_BYTES else b"")
        size += len(first)
        for part in others:
            yield b"".join(begun) if size <= MAX_ROW_BYTES else too_large()
            begun, size = [part], len(part)
        if size > MAX_ROW_BYTES:
            begun = []
    yield b"".join(begun) if size <= MAX_ROW_BYTES else too_large()


def too_large() -> BadRow:
    """What stands in the place of a row that memory may not hold."""
    return BadRow(f"row larger than {MAX_ROW_BYTES // 2**20} MiB")


def _row(line: bytes) -> dict[str, Any] | BadRow:
    try:
        text = line.decode()
    except UnicodeDecodeError:
        return BadRow("not UTF-8")
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return BadRow("not JSON")
    return _checked(row, text)


def _checked(row: Any, text: str) -> dict[str, Any] | BadRow:
    if not isinstance(row, dict):
        return BadRow("not a JSON object")
    # Only an escape can bring in half of a surrogate pair, which no encoding can write.
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return BadRow("half of a surrogate pair")
    return row


def array_rows(blocks: Iterable[bytes]) -> Iterator[dict[str, Any] | BadRow]:
    """The elements of one array, which starts with the first character that is not blank."""
    return _ArrayReader(blocks).rows()


class _ArrayReader:
    """An array of which a window is in memory.

    `text` from `at` on is not read yet. Bytes that are not UTF-8 are kept as lone surrogates, for the row that they
    are in to be refused.
    """

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks = iter(blocks)
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._text, self._at, self._ended = "", 0, False
        self._parser = json.JSONDecoder()

    def rows(self) -> Iterator[dict[str, Any] | BadRow]:
        self._next()
        self._at += 1
        while True:
            character = self._next()
            if character == "]":
                self._at += 1
                if self._next():
                    yield BadRow("text after the end of the array")
                return
            if not character:
                yield BadRow("array ends early")
                return
            if character == ",":
                self._at += 1
                continue
            row = self._element()
            if isinstance(row, BadRow) and not self._next():
                yield BadRow("array ends early")
                return
            yield row

    def _next(self) -> str:
        """The next character that is not blank, or nothing at the end."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_on(_BLOCK):
                return ""

    def _read_on(self, characters: int) -> bool:
        """Drop what was read and take in at least so many more; False, and nothing changes, where there are no more."""
        parts: list[str] = []
        taken = 0
        while taken < characters and not self._ended:
            block = next(self._blocks, None)
            self._ended = block is None
            parts.append(self._decoder.decode(block or b"", final=block is None))
            taken += len(parts[-1])
        if taken:
            self._text, self._at = "".join([self._text[self._at :], *parts]), 0
        return taken > 0

    def _element(self) -> dict[str, Any] | BadRow:
        while True:
            try:
                value, end = self._parser.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                held, into = len(self._text) - self._at, error.pos - self._at
                # A string without its end, or an error near the end of the window, may only need more text.
                cut = error.msg.startswith("Unterminated string") or error.pos > len(self._text) - _LOOK_AHEAD
                if cut and held > MAX_ROW_BYTES:
                    return self._skip_broken(into, too_large())
                if cut and self._read_on(self._more(held)):
                    continue
                return self._skip_broken(into, BadRow("not JSON"))
            except (ValueError, RecursionError):
                return self._skip_broken(1, BadRow("not JSON"))
            if not isinstance(value, dict) and end > len(self._text) - _LOOK_AHEAD and self._read_on(_BLOCK):
                continue  # a number may go on
            source = self._text[self._at : end]
            self._at = end
            try:
                source.encode()
            except UnicodeEncodeError:
                return BadRow("not UTF-8")
            return _checked(value, source)

    @staticmethod
    def _more(held: int) -> int:
        """Twice as much each time, so that a large row is not parsed over and over."""
        return max(_BLOCK, min(held, MAX_ROW_BYTES - held + 1))

    def _skip_broken(self, into: int, row: BadRow) -> BadRow:
        """Go to where, at least `into` characters on, the next row seems to begin, or to the array's end."""
        self._at += into
        while True:
            found = _NEXT_ROW.search(self._text, self._at)
            if found:
                self._at = found.end()
                return row
            # What separates two rows may lie across the window's end.
            self._at = max(self._at, len(self._text) - 64)
            if not self._read_on(_BLOCK):
                end = self._text.rstrip()
                self._at = max(self._at, len(end) - end.endswith("]"))
                return row
