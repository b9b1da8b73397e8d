"""One shard: a Megatron indexed dataset, an optional loss mask, and the manifest that commits them.

    NAME-00000-of-00002.bin            token ids, document after document (uint16 or int32)
    NAME-00000-of-00002.idx            Megatron's index; one sequence is one document
    NAME-00000-of-00002.mask.bin       one uint8 a token, 1 where the token is trained on (only where that is a part)
    NAME-00000-of-00002.manifest.json  what went in, what came out, checksums; written last

Files are written under a temporary name, flushed, and renamed in that order, so a shard without a valid manifest does
not exist, and a rerun after a kill gives the same bytes.
"""

from __future__ import annotations

import dataclasses
import struct
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from palimpsa_data.documents import Skipped
from palimpsa_data.errors import DataError
from palimpsa_data.files import (
    fsync,
    json_bytes,
    publish,
    read_json,
    require_free_space,
    sha256_file,
    temporary,
    write_atomically,
)

FORMAT = 1
_SUFFIXES = (".bin", ".idx", ".mask.bin")
_INDEX_DTYPES: dict[int, np.dtype[Any]] = {8: np.dtype(np.uint16), 4: np.dtype(np.int32)}
_INDEX_HEADER = struct.Struct("<9sQBQQ")


@dataclass(frozen=True)
class Encoded:
    """A document as token ids [T], its end-of-document id included, and which of them are trained on (None: all)."""

    tokens: np.ndarray
    mask: np.ndarray | None = None


@dataclass(frozen=True)
class ShardSpec:
    """Everything that decides a shard's bytes; a shard made from another spec is made again."""

    input_sha256: str
    tokenizer_sha256: str
    config_sha256: str
    vocab_size: int
    loss_mask: bool


@dataclass(frozen=True)
class Manifest:
    """Content of NAME.manifest.json. `outputs` maps file names to {"bytes", "sha256"}."""

    format: int
    spec: ShardSpec
    dtype: str
    documents: int
    tokens: int
    trained_tokens: int
    longest: int
    max_id: int
    skipped: dict[str, int]
    outputs: dict[str, dict[str, Any]]


def shard_stem(folder: Path, name: str, shard: int, shards: int) -> Path:
    return folder / f"{name}-{shard:05d}-of-{shards:05d}"


def manifest_path(stem: Path) -> Path:
    return stem.with_name(stem.name + ".manifest.json")


def output_path(stem: Path, suffix: str) -> Path:
    return stem.with_name(stem.name + suffix)


def write_shard(
    stem: Path, documents: Iterable[Encoded | Skipped], spec: ShardSpec, *, most_tokens: int
) -> tuple[Manifest, bool]:
    """Write the shard unless a valid one of the same spec is there; -> its manifest and whether it was written.

    Args:
        stem: path without suffix.
        documents: consumed only when the shard is written.
        most_tokens: upper bound of the shard's tokens, for the check of free disk space.

    Raises:
        DataError: an id outside the vocabulary, a full disk; the shard then stays without a manifest.
    """
    if is_complete(stem, spec):
        return read_manifest(stem), False
    stem.parent.mkdir(parents=True, exist_ok=True)
    _withdraw(stem)
    dtype = np.dtype(np.uint16 if spec.vocab_size < 65500 else np.int32)  # Megatron's own limit
    require_free_space(stem.parent, most_tokens * (dtype.itemsize + spec.loss_mask))
    try:
        manifest = _write_outputs(stem, documents, spec, dtype)
    except OSError as error:
        raise DataError(
            f"cannot write shard {stem}: {error.strerror}; it stays unfinished: make space, then run again"
        ) from error
    write_atomically(manifest_path(stem), json_bytes(dataclasses.asdict(manifest)))
    return manifest, True


def _withdraw(stem: Path) -> None:
    """Remove the manifest first: from then on nothing of this shard counts."""
    for suffix in (".manifest.json", *_SUFFIXES):
        path = output_path(stem, suffix)
        path.unlink(missing_ok=True)
        temporary(path).unlink(missing_ok=True)
    fsync(stem.parent)


def _write_outputs(
    stem: Path, documents: Iterable[Encoded | Skipped], spec: ShardSpec, dtype: np.dtype[Any]
) -> Manifest:
    paths = [output_path(stem, suffix) for suffix in (_SUFFIXES if spec.loss_mask else _SUFFIXES[:2])]
    builder = _indexed_dataset_builder(temporary(paths[0]), dtype)
    masks = temporary(paths[2]).open("wb") if spec.loss_mask else None
    skipped: Counter[str] = Counter()
    trained, max_id = 0, -1
    try:
        for document in documents:
            if isinstance(document, Skipped):
                skipped[document.reason] += 1
                continue
            if document.tokens.size == 0:
                skipped["empty"] += 1
                continue
            low, high = int(document.tokens.min()), int(document.tokens.max())
            if low < 0 or high >= spec.vocab_size:
                raise DataError(f"shard {stem}: token id {min(low, 0) or high} is outside 0..{spec.vocab_size - 1}")
            max_id = max(max_id, high)
            builder.add_document(document.tokens, [document.tokens.size])
            trained += _write_mask(masks, document)
    finally:
        builder.data_file.close()
        if masks is not None:
            masks.close()
    builder.finalize(str(temporary(paths[1])))
    lengths = builder.sequence_lengths
    outputs = {}
    for path in paths:
        fsync(temporary(path))
        outputs[path.name] = {"bytes": temporary(path).stat().st_size, "sha256": sha256_file(temporary(path))}
    for path in paths:
        publish(path)
    return Manifest(
        format=FORMAT,
        spec=spec,
        dtype=dtype.name,
        documents=len(lengths),
        tokens=sum(lengths),
        trained_tokens=trained,
        longest=max(lengths, default=0),
        max_id=max_id,
        skipped=dict(sorted(skipped.items())),
        outputs=outputs,
    )


def _indexed_dataset_builder(path: Path, dtype: np.dtype[Any]) -> Any:
    with warnings.catch_warnings():
        # Megatron warns about GPU libraries, which tokenising has no use for.
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    return IndexedDatasetBuilder(str(path), dtype=dtype.type)


def _write_mask(masks: Any, document: Encoded) -> int:
    if masks is None:
        return document.tokens.size
    mask = np.ones(document.tokens.size, np.uint8) if document.mask is None else document.mask.astype(np.uint8)
    if mask.size != document.tokens.size:
        raise DataError(f"a loss mask has {mask.size} entries for {document.tokens.size} tokens")
    masks.write(mask.tobytes())
    return int(mask.sum())


def read_manifest(stem: Path) -> Manifest:
    """Raises DataError naming the file when it is missing or is not a manifest of this format."""
    path = manifest_path(stem)
    content = read_json(path)
    try:
        if content["format"] != FORMAT:
            raise DataError(f"{path}: format {content['format']}, this version reads {FORMAT}; prepare the data again")
        return Manifest(**{**content, "spec": ShardSpec(**content["spec"])})
    except (KeyError, TypeError) as error:
        raise DataError(f"{path}: not a shard manifest ({error}); prepare the data again") from None


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
    dtype = np.dtype(manifest.dtype)
    tokens = int(index.lengths.sum(dtype=np.int64))
    if index.dtype != dtype or len(index.lengths) != manifest.documents or tokens != manifest.tokens:
        raise DataError(
            f"{path}: {len(index.lengths)} documents, {tokens} tokens of {index.dtype}; its manifest says "
            f"{manifest.documents}, {manifest.tokens} of {dtype}; prepare the data again"
        )
    per_token = {".bin": dtype.itemsize} | ({".mask.bin": 1} if manifest.spec.loss_mask else {})
    for suffix, itemsize in per_token.items():
        output = output_path(stem, suffix)
        if manifest.outputs.get(output.name, {}).get("bytes") != tokens * itemsize:
            raise DataError(f"{output} does not hold the {tokens} tokens of its index; prepare the data again")
    if manifest.max_id >= manifest.spec.vocab_size:
        raise DataError(f"{output_path(stem, '.bin')}: id {manifest.max_id} >= vocabulary {manifest.spec.vocab_size}")


@dataclass(frozen=True)
class Index:
    """What Megatron's .idx says: dtype of the .bin, tokens of each document [D], where each starts (in tokens) [D]."""

    dtype: np.dtype[Any]
    lengths: np.ndarray
    starts: np.ndarray


def read_index(path: Path) -> Index:
    """Read a .idx without importing torch.

    Raises:
        DataError: not a Megatron index, or one whose parts do not agree with each other.
    """
    try:
        content = path.read_bytes()
        magic, version, code, sequences, boundaries = _INDEX_HEADER.unpack_from(content)
        dtype = _INDEX_DTYPES[code]
        offset = _INDEX_HEADER.size
        lengths = np.frombuffer(content, np.int32, sequences, offset)
        pointers = np.frombuffer(content, np.int64, sequences, offset + 4 * sequences)
        documents = np.frombuffer(content, np.int64, boundaries, offset + 12 * sequences)
    except (OSError, struct.error, KeyError, ValueError) as error:
        raise DataError(f"{path}: not a readable Megatron index ({error}); prepare the data again") from None
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    whole = len(content) == offset + 12 * sequences + 8 * boundaries
    one_each = np.array_equal(documents, np.arange(sequences + 1))
    if (magic, version) != (b"MMIDIDX\x00\x00", 1) or not whole or not one_each:
        raise DataError(f"{path}: not a Megatron index with one sequence a document; prepare the data again")
    if not np.array_equal(pointers, starts * dtype.itemsize) or (lengths <= 0).any():
        raise DataError(f"{path}: document lengths and positions do not agree; prepare the data again")
    return Index(dtype, lengths, starts)
