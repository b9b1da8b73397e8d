"""What there is to prepare: files, folders, globs, saved `datasets` and names on the hub, in an order of their own.

An `Input` becomes one shard, so the order must be the same on every machine and for every spelling of the same files.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from palimpsa_data.errors import DataError
from palimpsa_data.files import json_sha256, read_json, sha256_file
from palimpsa_data.sources.hub import HubShard, hub_shards
from palimpsa_data.sources.options import Loose

Format = Literal["parquet", "arrow", "json", "text", "blobs", "hub"]

_FORMATS: dict[str, Format] = {".parquet": "parquet", ".jsonl": "json", ".ndjson": "json", ".json": "json"}
_COMPRESSED = (".gz", ".zst")
_ACCEPTED = (
    ".parquet, .jsonl, .ndjson, .json (the last three also with .gz or .zst behind), folders saved by `datasets`"
)
_TEXT = (".txt", ".md")
_BLOB = re.compile(r"[0-9a-f]{40}(\.gz)?")
# Left by version control, by `datasets` and by whoever made the folder; none of them holds rows.
_METADATA = {"dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json"}
# What `prep` writes: a folder with one of these is an output, not an input.
_PREPARED = re.compile(r"-\d{5}-of-\d{5}\.(manifest|input)\.json")
_JOB_KEYS = {"format", "inputs", "kind", "recipe", "tokenizer"}
_HUB_NAME = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(:(?P<config>[\w.-]+))?")


@dataclass(frozen=True)
class Input:
    """One future shard.

    `name` is relative to what was asked for, so that it does not depend on the machine; `bytes` is 0 where the hub does
    not say. `path` is a file, or the folder of loose files, or the hub's name.
    """

    name: str
    path: Path
    format: Format
    bytes: int
    hub: HubShard | None = None

    @property
    def stem(self) -> str:
        """The file's name without what says its format."""
        return re.sub(r"(\.(parquet|arrow|jsonl|ndjson|json|txt|md))?(\.gz|\.zst)?$", "", self.path.name)

    def sha256(self) -> str:
        """Of the content; of the hub's revision where there is no local file."""
        if self.hub is not None:
            return self.hub.sha256()
        if self.format in ("text", "blobs"):
            return json_sha256([[path.name, sha256_file(path)] for path in loose_files(self)])
        return sha256_file(self.path)


def find_inputs(patterns: Sequence[str], loose: Loose = "") -> list[Input]:
    """Every file with rows among the patterns, sorted by path; folders are searched to their ends.

    Args:
        patterns: files, folders, globs (`**` too), or names on the Hugging Face hub: `org/name` or `org/name:config`.
        loose: files without rows that count too. "text": each folder's .txt and .md files make up one input; "blobs":
            so do each folder's files named by 40 hexadecimal digits.

    Raises:
        DataError: a pattern that matches nothing, a file of unknown format, the same file twice, a link to nothing, a
            name that is not UTF-8.
    """
    found: dict[Path, Input] = {}
    for pattern in patterns:
        for item in _matching(pattern, loose):
            _require_utf8(item)
            key = item.path.resolve() if item.hub is None else Path(item.name)
            if key in found:
                raise DataError(f"{item.path} is named twice: by {pattern} and before; leave one out")
            found[key] = item
    for path, item in found.items():
        if item.path.is_file() and item.format in ("text", "blobs") and path.parent in found:
            raise DataError(f"{item.path} is named twice: its folder is an input too; leave one out")
    return sorted(found.values(), key=lambda item: (item.path.absolute().as_posix(), item.name))


def loose_files(folder: Input) -> list[Path]:
    """The files that make up an input of format "text" or "blobs", sorted by name."""
    if folder.path.is_file():
        return [folder.path]
    with os.scandir(folder.path) as entries:
        return sorted(Path(entry) for entry in entries if entry.is_file() and _is_loose(entry.name, folder.format))


def _is_loose(name: str, kind: str) -> bool:
    if kind == "text":
        return name.lower().endswith(_TEXT)
    return kind == "blobs" and _BLOB.fullmatch(name) is not None


def _matching(pattern: str, loose: Loose) -> Iterator[Input]:
    # Path.glob takes no absolute patterns.
    paths = [Path(pattern)] if Path(pattern).exists() else sorted(map(Path, glob.glob(pattern, recursive=True)))  # noqa: PTH207
    hub = _HUB_NAME.fullmatch(pattern)
    if not paths and hub and _format(Path(pattern), loose) is None:
        for shard in hub_shards(hub["name"], hub["config"]):
            yield Input(shard.label, Path(pattern), "hub", shard.bytes, shard)
        return
    if not paths:
        raise DataError(
            f"{pattern}: there is no such file or folder; give files, folders, globs or a hub name org/name"
        )
    count = 0
    # "**" gives folders and what is in them.
    folders = {path for path in paths if path.is_dir()}
    for path in paths:
        if folders.isdisjoint(path.parents):
            for item in _walk(path, loose) if path in folders else _file(path, path.name, loose):
                yield item
                count += 1
    if not count:
        raise DataError(f"{pattern}: no input among it; accepted are {_accepted(loose)}")


def _walk(folder: Path, loose: Loose) -> Iterator[Input]:
    def refuse(error: OSError) -> None:
        raise DataError(f"cannot look into {error.filename}: {error.strerror}")

    seen: set[Path] = set()
    for name, subfolders, files in os.walk(folder, onerror=refuse, followlinks=True):
        here = Path(name)
        subfolders[:] = sorted(sub for sub in subfolders if not sub.startswith("."))
        # A link may lead back to where the search was.
        if here.resolve() in seen or _is_prepared(here, files):
            subfolders.clear()
            continue
        seen.add(here.resolve())
        if "dataset_dict.json" in files:
            splits = read_json(here / "dataset_dict.json").get("splits", [])
            raise DataError(
                f"{here} holds several splits; name one: {', '.join(str(here / split) for split in splits)}"
            )
        if "state.json" in files and "dataset_info.json" in files:
            yield from _saved_dataset(here, folder)
            continue
        loose_here = [file for file in files if _is_loose(file, loose)]
        if loose and loose_here:
            size = sum(_size(here / file) for file in loose_here)
            yield Input(_name(here, folder), here, loose, size)
        for file in sorted(set(files) - set(loose_here)):
            path = here / file
            if not file.startswith((".", "_")) and file not in _METADATA:
                yield from _file(path, _name(path, folder), "")


def _saved_dataset(here: Path, root: Path) -> Iterator[Input]:
    state = read_json(here / "state.json")
    files = [entry.get("filename") for entry in state.get("_data_files", []) if isinstance(entry, dict)]
    for file in files:
        path = here / str(file)
        if not path.is_file():
            raise DataError(f"{path} is missing, {here / 'state.json'} names it: save or copy the dataset again")
        yield Input(_name(path, root), path, "arrow", path.stat().st_size)


def _file(path: Path, name: str, loose: Loose) -> Iterator[Input]:
    kind = _format(path, loose)
    if kind is not None:
        yield Input(name, path, kind, _size(path))


def _size(path: Path) -> int:
    if not path.is_file():
        raise DataError(f"{path} is a link to nothing, or no regular file; repair it or take it away")
    return path.stat().st_size


def _is_prepared(folder: Path, files: Sequence[str]) -> bool:
    if any(_PREPARED.search(file) for file in files):
        return True
    # A job that has not come further.
    return "job.json" in files and _is_job(folder / "job.json")


def _is_job(path: Path) -> bool:
    try:
        return read_json(path).keys() >= _JOB_KEYS
    except DataError:
        return False


def _require_utf8(item: Input) -> None:
    try:
        item.name.encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{os.fsencode(item.path)!r}: the name is not UTF-8, records could not hold it; rename it"
        ) from None


def _format(path: Path, loose: Loose) -> Format | None:
    name = path.name.lower()
    if _is_loose(name, loose) and loose:
        return loose
    if name.endswith(_COMPRESSED):
        name = name.rpartition(".")[0]
        return "json" if _FORMATS.get(Path(name).suffix) == "json" else None
    return _FORMATS.get(Path(name).suffix)


def _accepted(loose: Loose) -> str:
    return _ACCEPTED + {"": "", "text": ", .txt, .md", "blobs": ", files named by 40 hexadecimal digits"}[loose]


def _name(path: Path, root: Path) -> str:
    relative = path.relative_to(root)
    return (Path(root.name) / relative).as_posix()
