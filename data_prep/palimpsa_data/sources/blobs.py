"""Source files by their Software Heritage id, as gzip or as they are, in a local or mounted folder."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

from palimpsa_data.documents import Skipped
from palimpsa_data.errors import DataError

MAX_BLOB_BYTES = 128 * 2**20
_ID = re.compile(r"[0-9a-f]{40}")
_GZIP_MAGIC = b"\x1f\x8b"


class BlobFolder:
    """FOLDER/{id} or FOLDER/content/{id}, each with or without .gz.

    Raises:
        DataError: there is no such folder.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise DataError(f"--blobs {folder}: there is no such folder")
        content = folder / "content"
        self._folder = content if content.is_dir() else folder

    def read(self, blob_id: object) -> bytes | Skipped:
        """The content of one blob; what is no id is never made into a path."""
        if not isinstance(blob_id, str) or not _ID.fullmatch(blob_id):
            return Skipped("blob_id is not 40 hexadecimal digits", damaged=True)
        for name in (f"{blob_id}.gz", blob_id):
            try:
                return read_blob(self._folder / name)
            except FileNotFoundError:
                continue
        return Skipped("blob is not in the folder")


def read_blob(path: Path) -> bytes | Skipped:
    """The content of a blob's file, unpacked where it is gzip."""
    if path.stat().st_size > MAX_BLOB_BYTES:
        return _too_large()
    return expand(path.read_bytes())


def _too_large() -> Skipped:
    return Skipped(f"blob larger than {MAX_BLOB_BYTES // 2**20} MiB")


def expand(content: bytes) -> bytes | Skipped:
    """The content, unpacked where it is gzip."""
    parts: list[bytes] = []
    room = MAX_BLOB_BYTES
    while content.startswith(_GZIP_MAGIC):
        stream = zlib.decompressobj(wbits=31)
        try:
            parts.append(stream.decompress(content, room + 1))
        except zlib.error:
            return Skipped("gzip is damaged", damaged=True)
        room -= len(parts[-1])
        if room < 0:
            return _too_large()
        if not stream.eof:
            return Skipped("gzip ends early", damaged=True)
        content = stream.unused_data
    # Bytes behind the last member are padding.
    return b"".join(parts) if parts else content
