"""Any other text: rows with a text column, or plain text files."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from palimpsa_data.documents import Document, Skipped
from palimpsa_data.sources import streams
from palimpsa_data.sources.inputs import Input, loose_files
from palimpsa_data.sources.options import TextOptions
from palimpsa_data.sources.rows import read_rows
from palimpsa_data.sources.streams import BadRow
from palimpsa_data.sources.texts import checked_text, document


def read(source: Input, options: TextOptions, progress: Callable[[int], None]) -> Iterator[Document | Skipped]:
    """One document a row or text file; shares are counted by file, by folder for text files.

    Raises:
        DataError: the file has no such column.
    """
    if source.format == "text":
        yield from _files(source, options, progress)
        return
    column = options.text_column
    for row in read_rows(source, {column}, progress, required=[(column,)]):
        if isinstance(row, BadRow):
            yield Skipped(row.reason, damaged=True)
        else:
            yield document(checked_text(row.get(column), column), source.stem, options)


def _files(source: Input, options: TextOptions, progress: Callable[[int], None]) -> Iterator[Document | Skipped]:
    done = 0
    for path in loose_files(source):
        size = path.stat().st_size
        if size > streams.MAX_ROW_BYTES:
            yield Skipped(f"text file larger than {streams.MAX_ROW_BYTES // 2**20} MiB", damaged=True)
        else:
            text = checked_text(path.read_bytes(), "text")
            yield document(text if isinstance(text, Skipped) else text.removeprefix("\ufeff"), source.stem, options)
        done += size
        progress(done)
