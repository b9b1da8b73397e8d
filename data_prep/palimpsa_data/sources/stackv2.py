"""The Stack v2 in the shapes that people hold it in: with its content, or as ids beside a folder of blobs.

- one row a file, its text in `content` (or `text`), as a string or as bytes in the row's `src_encoding`
- one row a repository, the same in each of `files`
- either of them without content, `blob_id` naming a blob
- nothing but the blobs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from palimpsa_data.documents import Document, Skipped
from palimpsa_data.errors import DataError
from palimpsa_data.sources.blobs import BlobFolder, expand, read_blob
from palimpsa_data.sources.encodings import decode
from palimpsa_data.sources.inputs import Input, loose_files
from palimpsa_data.sources.options import StackV2Options
from palimpsa_data.sources.rows import read_rows
from palimpsa_data.sources.streams import BadRow
from palimpsa_data.sources.texts import checked_text, document

_CONTENT = ("content", "text")
_COLUMNS = {*_CONTENT, "files", "blob_id", "src_encoding", "language", "license_type", "detected_licenses"}


def read(source: Input, options: StackV2Options, progress: Callable[[int], None]) -> Iterator[Document | Skipped]:
    """One document a source file; shares are counted by language.

    Raises:
        DataError: the input holds ids only and there is no folder of blobs, or blobs that a filter cannot know.
    """
    if source.format == "blobs":
        yield from _bare_blobs(source, options, progress)
        return
    blobs = BlobFolder(Path(options.blobs)) if options.blobs is not None else None
    wanted = _Wanted(options)
    for row in read_rows(source, _COLUMNS, progress, required=[(*_CONTENT, "files", "blob_id")]):
        if isinstance(row, BadRow):
            yield Skipped(row.reason, damaged=True)
            continue
        for file in _files(row):
            if isinstance(file, Skipped):
                yield file
                continue
            if blobs is None and "blob_id" in file and not any(name in file for name in _CONTENT):
                raise DataError(
                    f"{source.path} holds ids only (blob_id, no content): give the folder that the blobs were "
                    "fetched to with --blobs FOLDER, or a variant of the data set with its content"
                )
            text = wanted.reason(file) or _text(file, blobs)
            yield document(text, _language(file) or "unknown", options)


def _files(row: dict[str, Any]) -> Iterator[dict[str, Any] | Skipped]:
    if "files" not in row or any(name in row for name in _CONTENT):
        yield row
        return
    files = row["files"]
    if not isinstance(files, list):
        yield Skipped("null files" if files is None else "files is not a list", damaged=True)
        return
    shared = {name: value for name, value in row.items() if name != "files"}
    for file in files:
        yield {**shared, **file} if isinstance(file, dict) else Skipped("file is not an object", damaged=True)


def _text(file: dict[str, Any], blobs: BlobFolder | None) -> str | Skipped:
    content = next((file[name] for name in _CONTENT if file.get(name) is not None), None)
    if content is None and blobs is not None:
        content = blobs.read(file.get("blob_id"))
    elif isinstance(content, bytes):
        content = expand(content)
    if isinstance(content, bytes):
        encoding = file.get("src_encoding")
        content = decode(content, encoding if isinstance(encoding, str) else None)
    return content if isinstance(content, Skipped) else checked_text(content, "content")


def _bare_blobs(
    source: Input, options: StackV2Options, progress: Callable[[int], None]
) -> Iterator[Document | Skipped]:
    if options.languages or options.license_types or options.licenses:
        raise DataError(
            f"{source.path}: blobs alone say neither language nor licence; give the files with their ids as input and "
            "this folder as --blobs"
        )
    done = 0
    for path in loose_files(source):
        content = read_blob(path)
        text = content if isinstance(content, Skipped) else decode(content, None)
        yield document(text if isinstance(text, Skipped) else checked_text(text, "content"), "unknown", options)
        done += path.stat().st_size
        progress(done)


def _language(file: dict[str, Any]) -> str | None:
    language = file.get("language")
    return language if isinstance(language, str) and language else None


class _Wanted:
    """The filters on what a row says of its file."""

    def __init__(self, options: StackV2Options) -> None:
        self._options = options
        self._languages = {language.casefold() for language in options.languages}
        self._licenses = {license.casefold() for license in options.licenses}

    def reason(self, file: dict[str, Any]) -> Skipped | None:
        """Why the file is not wanted, or None."""
        options = self._options
        if self._languages and (_language(file) or "").casefold() not in self._languages:
            return Skipped(f"language is not {' or '.join(options.languages)}")
        if options.license_types and file.get("license_type") not in options.license_types:
            return Skipped(f"licence type is not {' or '.join(options.license_types)}")
        if self._licenses:
            detected = file.get("detected_licenses")
            names = {str(name).casefold() for name in detected} if isinstance(detected, list) else set()
            if not names or not names <= self._licenses:
                return Skipped(f"licence is not {' or '.join(options.licenses)}")
        return None
