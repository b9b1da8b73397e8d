"""One shard: a Megatron indexed dataset, an optional loss mask, and the manifest that commits them.

    NAME-00000-of-00002.bin            token ids, document after document (uint16 or int32)
    NAME-00000-of-00002.idx            Megatron's index; one sequence is one document
    NAME-00000-of-00002.mask.bin       one uint8 a token, 1 where the token is trained on (only where that is a part)
    NAME-00000-of-00002.manifest.json  what went in, what came out, checksums; written last

Files are written under a temporary name, flushed, and renamed in that order, so a shard without a valid manifest does
not exist, and a rerun after a kill gives the same bytes. NAME-00000-of-00002.lock is there while a process works on
the shard, and after a kill until the next one does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from palimpsa_data.documents import Skipped
from palimpsa_data.errors import DataError
from palimpsa_data.files import fsync, json_bytes, own_temporary, require_free_space, sha256_file
from palimpsa_data.indexed import read_index, token_dtype
from palimpsa_data.locks import lock
from palimpsa_data.records import read_record
from palimpsa_data.shard_writer import Encoded, EncodedBatch, FileRecord, ShardWriter

FORMAT = 2
_SUFFIXES = (".bin", ".idx", ".mask.bin")


@dataclass(frozen=True)
class ShardSpec:
    """Everything that decides a shard's bytes; a shard made from another spec is made again."""

    input_sha256: str
    tokenizer_sha256: str
    config_sha256: str
    vocab_size: int
    loss_mask: bool
    input_name: str = ""
    input_bytes: int = 0


@dataclass(frozen=True)
class Manifest:
    """Content of NAME.manifest.json.

    `text_bytes` is the texts' size in UTF-8 where it was known; `damaged` counts those `skipped` that were broken;
    `lengths` counts documents by length (see `lengths.BUCKETS`); `sources` has documents and tokens of each source;
    `outputs` maps file names to {"bytes", "sha256"}.
    """

    format: int
    spec: ShardSpec
    dtype: str
    documents: int
    tokens: int
    trained_tokens: int
    text_bytes: int
    shortest: int
    longest: int
    max_id: int
    damaged: int
    lengths: dict[str, int]
    sources: dict[str, list[int]]
    skipped: dict[str, int]
    outputs: dict[str, FileRecord]


def shard_stem(folder: Path, name: str, shard: int, shards: int) -> Path:
    return folder / f"{name}-{shard:05d}-of-{shards:05d}"


def manifest_path(stem: Path) -> Path:
    return stem.with_name(stem.name + ".manifest.json")


def output_path(stem: Path, suffix: str) -> Path:
    return stem.with_name(stem.name + suffix)


def write_shard(
    stem: Path,
    documents: Iterable[Encoded | EncodedBatch | Skipped],
    spec: ShardSpec,
    *,
    most_tokens: int = 0,
    wait: bool = True,
) -> tuple[Manifest, bool]:
    """Write the shard unless a valid one of the same spec is there; -> its manifest and whether it was written.

    Args:
        stem: path without suffix.
        documents: consumed only when the shard is written.
        most_tokens: tokens that must find space on the disk before anything is written.
        wait: for another process that writes the shard.

    Raises:
        BusyError: another process writes the shard and `wait` is false.
        DataError: an id outside the vocabulary, a full disk; the shard then stays without a manifest.
    """
    lock_file = output_path(stem, ".lock")
    if not lock_file.exists() and is_complete(stem, spec):
        return read_manifest(stem), False
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        with lock(lock_file, wait=wait):
            if is_complete(stem, spec):  # by whoever held the lock, or died before giving it back
                return read_manifest(stem), False
            _withdraw(stem)
            token_bytes = token_dtype(spec.vocab_size).itemsize + spec.loss_mask
            require_free_space(stem.parent, most_tokens * token_bytes)
            return _write(stem, documents, spec), True
    except OSError as error:
        raise DataError(
            f"cannot write shard {stem}: {error.strerror}; it stays unfinished: make space, then run again"
        ) from error


def _withdraw(stem: Path) -> None:
    """Remove the manifest first: from then on nothing of this shard counts."""
    for path in (manifest_path(stem), *(output_path(stem, suffix) for suffix in _SUFFIXES)):
        path.unlink(missing_ok=True)
        for left_over in sorted(path.parent.glob(f"{glob.escape(path.name)}.*.tmp")):
            left_over.unlink(missing_ok=True)
    fsync(stem.parent)


def _write(stem: Path, documents: Iterable[Encoded | EncodedBatch | Skipped], spec: ShardSpec) -> Manifest:
    paths = [output_path(stem, suffix) for suffix in (_SUFFIXES if spec.loss_mask else _SUFFIXES[:2])]
    written = [own_temporary(path) for path in (*paths, manifest_path(stem))]
    try:
        writer = ShardWriter(written[:-1], spec.vocab_size, str(stem))
        with contextlib.closing(writer):
            for document in documents:
                writer.add(document)
            outputs = writer.finish()
        manifest = Manifest(
            format=FORMAT,
            spec=spec,
            dtype=writer.dtype.name,
            **dataclasses.asdict(writer.counts),
            lengths={str(shortest): count for shortest, count in sorted(writer.lengths.items())},
            sources=dict(sorted(writer.sources.items())),
            skipped=dict(sorted(writer.skipped.items())),
            outputs={path.name: output for path, output in zip(paths, outputs, strict=True)},
        )
        written[-1].write_bytes(json_bytes(dataclasses.asdict(manifest)))
        fsync(written[-1])
        for temporary, path in zip(written, (*paths, manifest_path(stem)), strict=True):
            temporary.replace(path)
            fsync(stem.parent)
    finally:
        for temporary in written:
            temporary.unlink(missing_ok=True)
    return manifest


def read_manifest(stem: Path) -> Manifest:
    """Raises DataError naming the file when it is missing or is not a manifest of this format."""
    return read_record(manifest_path(stem), Manifest, format=FORMAT, what="a shard manifest")


def is_complete(stem: Path, spec: ShardSpec) -> bool:
    """Whether a shard made from `spec` is there, every byte of it as its manifest says."""
    try:
        return check_shard(stem, checksums=True).spec == spec
    except DataError:
        return False


def check_shard(stem: Path, *, checksums: bool) -> Manifest:
    """Compare a shard's files with its manifest: sizes and index always, content too with `checksums`.

    Raises:
        DataError: names the file that is missing, truncated, swapped or changed.
    """
    manifest = read_manifest(stem)
    for name, output in manifest.outputs.items():
        path = stem.with_name(name)
        if not path.is_file():
            raise DataError(f"{path} is missing; prepare the data again")
        size = path.stat().st_size
        if size != output["bytes"]:
            raise DataError(
                f"{path} holds {size} bytes, its manifest says {output['bytes']}: truncated or swapped; "
                "prepare the data again"
            )
        if checksums and sha256_file(path) != output["sha256"]:
            raise DataError(f"{path}: content differs from its manifest (changed or swapped); prepare the data again")
    _check_index(stem, manifest)
    return manifest


def _check_index(stem: Path, manifest: Manifest) -> None:
    path = output_path(stem, ".idx")
    index = read_index(path)
    tokens = int(index.lengths.sum(dtype="int64"))
    if index.dtype.name != manifest.dtype or len(index.lengths) != manifest.documents or tokens != manifest.tokens:
        raise DataError(
            f"{path}: {len(index.lengths)} documents, {tokens} tokens of {index.dtype}; its manifest says "
            f"{manifest.documents}, {manifest.tokens} of {manifest.dtype}; prepare the data again"
        )
    per_token = {".bin": index.dtype.itemsize} | ({".mask.bin": 1} if manifest.spec.loss_mask else {})
    for suffix, itemsize in per_token.items():
        output = output_path(stem, suffix)
        if output.name not in manifest.outputs or manifest.outputs[output.name]["bytes"] != tokens * itemsize:
            raise DataError(f"{output} does not hold the {tokens} tokens of its index; prepare the data again")
    if manifest.max_id >= manifest.spec.vocab_size:
        raise DataError(f"{output_path(stem, '.bin')}: id {manifest.max_id} >= vocabulary {manifest.spec.vocab_size}")
