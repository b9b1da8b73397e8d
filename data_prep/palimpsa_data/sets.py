"""A set of shards: `set.json` names them; the reader and `verify` trust nothing that it does not name."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from palimpsa_data.errors import DataError
from palimpsa_data.files import json_bytes, sha256_file, write_atomically
from palimpsa_data.indexed import map_pointers, read_index, token_dtype
from palimpsa_data.records import is_file_name, read_record
from palimpsa_data.shards import FORMAT, Manifest, check_shard, manifest_path, output_path

_MOST_MAPPED = 128


@dataclass(frozen=True)
class TokenizerInfo:
    """What training must know of the tokenizer; `pad_id` fills places that neither the model nor the loss looks at."""

    sha256: str
    vocab_size: int
    eod_id: int
    pad_id: int


@dataclass(frozen=True)
class ShardEntry:
    name: str
    manifest_sha256: str
    documents: int
    tokens: int


@dataclass(frozen=True)
class SetInfo:
    """Content of set.json."""

    format: int
    name: str
    tokenizer: TokenizerInfo
    loss_mask: bool
    documents: int
    tokens: int
    trained_tokens: int
    longest: int
    skipped: dict[str, int]
    shards: tuple[ShardEntry, ...]


def write_set(folder: Path, name: str, tokenizer: TokenizerInfo, shards: dict[Path, Manifest]) -> SetInfo:
    """Write set.json over finished shards (stem -> manifest) in `folder`.

    Raises:
        DataError: the shards were made with different tokenizers, some with a loss mask and some without, or hold no
            token together.
    """
    for stem, manifest in shards.items():
        _require_tokenizer(stem, manifest, tokenizer)
    if len({manifest.spec.loss_mask for manifest in shards.values()}) > 1:
        raise DataError(f"set {folder}: some shards have a loss mask, some have none; make sets of their own of them")
    info = _summary(folder, name, tokenizer, shards)
    if info.tokens == 0:
        reasons = ", ".join(f"{count} for: {reason}" for reason, count in info.skipped.items())
        raise DataError(f"set {folder} would hold no token; left out were {reasons or 'none, the inputs are empty'}")
    content = json_bytes(dataclasses.asdict(info))
    path = folder / "set.json"
    if not path.is_file() or path.read_bytes() != content:
        write_atomically(path, content)
    return info


def _summary(folder: Path, name: str, tokenizer: TokenizerInfo, shards: dict[Path, Manifest]) -> SetInfo:
    manifests = list(shards.values())
    skipped: Counter[str] = Counter()
    for manifest in manifests:
        skipped.update(manifest.skipped)
    return SetInfo(
        format=FORMAT,
        name=name,
        tokenizer=tokenizer,
        loss_mask=any(manifest.spec.loss_mask for manifest in manifests),
        documents=sum(manifest.documents for manifest in manifests),
        tokens=sum(manifest.tokens for manifest in manifests),
        trained_tokens=sum(manifest.trained_tokens for manifest in manifests),
        longest=max((manifest.longest for manifest in manifests), default=0),
        skipped=dict(sorted(skipped.items())),
        shards=tuple(
            ShardEntry(stem.name, sha256_file(manifest_path(stem)), manifest.documents, manifest.tokens)
            for stem, manifest in shards.items()
        ),
    )


def read_set(folder: Path) -> SetInfo:
    """Raises DataError naming the file when it is missing or is not a set of this format."""
    path = folder / "set.json"
    if not path.is_file():
        raise DataError(f"{path} is missing: the set was never finished; prepare the data again")
    info = read_record(path, SetInfo, format=FORMAT, what="a set")
    tokenizer = info.tokenizer
    if not all(0 <= token < tokenizer.vocab_size for token in (tokenizer.eod_id, tokenizer.pad_id)):
        raise DataError(f"{path}: eod_id or pad_id is outside the vocabulary; prepare the data again")
    if not all(is_file_name(entry.name) for entry in info.shards):
        raise DataError(f"{path}: a shard lies outside the set; prepare the data again")
    return info


@dataclass(frozen=True)
class Share:
    """Every `count`-th file from number `index` on: what one of `count` ranks reads whole, so that none reads all."""

    index: int = 0
    count: int = 1

    def has(self, number: int) -> bool:
        return number % self.count == self.index


def check_set(folder: Path, *, checksums: bool, share: Share = Share()) -> SetInfo:
    """Check set.json, every manifest and every shard's sizes and index; with `checksums` what the files hold, too.

    Args:
        share: with `checksums`, the shards whose bytes are read.

    Raises:
        DataError: names the first file that is missing, truncated, swapped or changed.
    """
    info = read_set(folder)
    for problem in _problems(folder, info, checksums, share):
        raise problem
    return info


def verify(folder: Path) -> SetInfo:
    """Check everything that can be checked of a set, the ids in the .bin files included.

    Raises:
        DataError: names the first file that is not as it should be.
    """
    return check_set(folder, checksums=True)


def find_problems(folder: Path, tokenizer_sha256: str | None = None) -> list[str]:
    """What is wrong with a set, shard by shard, after reading every byte of it; empty where all is well.

    Args:
        tokenizer_sha256: the tokenizer that the set is to have been made with.
    """
    try:
        info = read_set(folder)
    except DataError as error:
        return [str(error)]
    found = [str(problem) for problem in _problems(folder, info, checksums=True, share=Share())]
    if tokenizer_sha256 not in (None, info.tokenizer.sha256):
        found.append(f"{folder / 'set.json'}: made with another tokenizer; prepare the data again with this one")
    return found


def _problems(folder: Path, info: SetInfo, checksums: bool, share: Share) -> Iterator[DataError]:
    """One a shard at the most, then those of the set as a whole."""
    manifests: dict[Path, Manifest] = {}
    for number, entry in enumerate(info.shards):
        try:
            manifests[folder / entry.name] = _check_entry(folder, info, entry, checksums and share.has(number))
        except DataError as error:
            yield error
    if len(manifests) == len(info.shards) and _summary(folder, info.name, info.tokenizer, manifests) != info:
        yield DataError(f"{folder / 'set.json'}: does not say what its shards' manifests say; merge the set again")


def _check_entry(folder: Path, info: SetInfo, entry: ShardEntry, content: bool) -> Manifest:
    stem = folder / entry.name
    path = manifest_path(stem)
    if not path.is_file():
        raise DataError(f"{path} is missing; prepare the data again")
    if sha256_file(path) != entry.manifest_sha256:
        raise DataError(f"{path}: changed after {folder / 'set.json'} was written; prepare the data again")
    manifest = check_shard(stem, checksums=content)
    _require_tokenizer(stem, manifest, info.tokenizer)
    if content and manifest.tokens:
        _check_ids(output_path(stem, ".bin"), manifest)
    return manifest


def _require_tokenizer(stem: Path, manifest: Manifest, tokenizer: TokenizerInfo) -> None:
    made_with = (manifest.spec.tokenizer_sha256, manifest.spec.vocab_size)
    if made_with != (tokenizer.sha256, tokenizer.vocab_size):
        raise DataError(f"{manifest_path(stem)}: made with another tokenizer than the set; prepare the data again")


def _check_ids(path: Path, manifest: Manifest) -> None:
    tokens = np.memmap(path, np.dtype(manifest.dtype), mode="r")
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most >= manifest.spec.vocab_size:
        bad = least if least < 0 else most
        raise DataError(f"{path}: id {bad} is outside the vocabulary of {manifest.spec.vocab_size}; prepare it again")


@dataclass(frozen=True)
class _Shard:
    tokens: np.ndarray
    mask: np.ndarray | None
    pointers: np.ndarray


class SetReader:
    """Random access to a set's documents, memory-mapped.

    `lengths` [D] int32 holds the tokens of each document, in set order.

    Raises:
        DataError: see `check_set`.
    """

    def __init__(self, folder: Path, *, checksums: bool, share: Share = Share()) -> None:
        self.folder = folder
        self.info = check_set(folder, checksums=checksums, share=share)
        self.sha256 = sha256_file(folder / "set.json")
        stems = [folder / entry.name for entry in self.info.shards]
        lengths = [np.array(read_index(output_path(stem, ".idx")).lengths) for stem in stems]
        self.lengths = np.concatenate(lengths)
        self._first_document = np.cumsum([0, *(len(part) for part in lengths)])
        self._dtype = token_dtype(self.info.tokenizer.vocab_size)
        # A map holds a file descriptor, of which a process has few.
        self._shard = functools.lru_cache(maxsize=_MOST_MAPPED)(self._map_shard)

    def read(self, document: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Tokens `start` to `stop` (clipped to the document) of one document: ids [n] and its loss mask [n] or None."""
        number = int(np.searchsorted(self._first_document, document, side="right")) - 1
        shard = self._shard(number)
        begin = int(shard.pointers[document - self._first_document[number]]) // self._dtype.itemsize
        part = slice(begin + start, begin + min(stop, int(self.lengths[document])))
        return shard.tokens[part], None if shard.mask is None else shard.mask[part]

    def _map_shard(self, number: int) -> _Shard:
        entry = self.info.shards[number]
        stem = self.folder / entry.name
        return _Shard(
            np.memmap(output_path(stem, ".bin"), self._dtype, mode="r"),
            np.memmap(output_path(stem, ".mask.bin"), np.uint8, mode="r") if self.info.loss_mask else None,
            map_pointers(output_path(stem, ".idx"), entry.documents),
        )
