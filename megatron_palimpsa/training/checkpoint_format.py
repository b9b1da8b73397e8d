"""The tensors of a checkpoint in PyTorch's and Megatron's distributed format, one file a rank.

A file `__RANK_0.distcp` holds the rank's boxes one after another, each as `torch.save` writes a tensor; `.metadata`
says where every box of every tensor lies. Megatron's dist_checkpointing and torch.distributed.checkpoint read it.
A rank writes and reads its own boxes alone: no communication, one box in memory.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import re
import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_palimpsa.engine.boxes import Box, Shape
from megatron_palimpsa.training.checkpoint_files import FileRecord, write_file

INDEX = ".metadata"
_BACKEND, _BACKEND_CONTENT = "metadata.json", b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
_COMMON = "common_state/shard_0_1"
"""Where Megatron looks for what is not a tensor; there is nothing, all of it is in `state.json`."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names it and says what is left."""


class SaveError(CheckpointError):
    """A save failed on some rank; raised on all of them."""


class Cancelled(Exception):
    """Another rank failed: the file being written is of no use."""


@dataclass(frozen=True)
class Entry:
    """Where one box lies in a file; `box` None is Megatron's common state."""

    box: Box | None
    dtype: torch.dtype
    start: int
    length: int


@dataclass(frozen=True)
class RankFile:
    """A rank's file as it was written."""

    name: str
    record: FileRecord
    entries: list[Entry]
    seconds: float = 0.0
    """That the rank took to write it."""


class _HashingFile:
    """A file that takes everything, so that nothing is thrown through torch's C++ writer, and keeps what failed."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        size = len(view)
        self._hash.update(view)
        self.size += size
        try:
            while self.error is None and len(view):
                view = view[self._file.write(view) or 0 :]
        except OSError as error:
            self.error = error
        return size

    def flush(self) -> None:
        pass

    def record(self) -> FileRecord:
        return FileRecord(self.size, self._hash.hexdigest())


def write_rank_file(
    folder: Path, rank: int, values: Iterable[tuple[Box, Tensor]], cancelled: threading.Event
) -> RankFile:
    """Write a rank's boxes, on whatever device they are, and force them to disk.

    The checksum is of the bytes as they are handed to the file system: what goes wrong behind it is found on loading.

    Raises:
        OSError: they could not be written.
        Cancelled: `cancelled` was set before the end.
    """
    name = f"__{rank}_0.distcp"
    entries = []
    with (folder / name).open("xb", buffering=0) as file:
        stream = _HashingFile(file)
        if rank == 0:
            torch.save([{}], cast(IO[bytes], stream))
            entries.append(Entry(None, torch.uint8, 0, stream.size))
        for box, value in values:
            start = stream.size
            # torch.save writes a tensor's whole storage: it must have one of its own.
            torch.save(torch.empty(box.shape, dtype=value.dtype).copy_(value), cast(IO[bytes], stream))
            if stream.error is not None:
                raise stream.error
            if cancelled.is_set():
                raise Cancelled
            entries.append(Entry(box, value.dtype, start, stream.size - start))
        os.fsync(file.fileno())
    return RankFile(name, stream.record(), entries)


def write_index(folder: Path, files: list[RankFile]) -> dict[str, FileRecord]:
    """Write what readers need beside the ranks' files; -> all files by name, with their checksums.

    Raises:
        CheckpointError: some element of a tensor is in no rank's file, or in two.
    """
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    elements: dict[str, int] = defaultdict(int)
    for file in files:
        for entry in file.entries:
            info = _StorageInfo(file.name, entry.start, entry.length)
            box = entry.box
            if box is None:
                tensors[_COMMON], storage[MetadataIndex(_COMMON)] = BytesStorageMetadata(), info
                continue
            tensor = tensors.setdefault(
                box.key, TensorStorageMetadata(TensorProperties(entry.dtype), torch.Size(box.whole), [])
            )
            assert isinstance(tensor, TensorStorageMetadata)
            index = MetadataIndex(box.key, box.offset, len(tensor.chunks))
            if index in storage:
                raise CheckpointError(f"{box.key}: two ranks wrote the part at {box.offset}")
            tensor.chunks.append(ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)))
            storage[index] = info
            elements[box.key] += box.numel
    for key, tensor in tensors.items():
        if isinstance(tensor, TensorStorageMetadata) and elements[key] != tensor.size.numel():
            raise CheckpointError(f"{key}: the ranks wrote {elements[key]} of its {tensor.size.numel()} elements")
    records = {file.name: file.record for file in files}
    content = pickle.dumps(Metadata(tensors, planner_data=None, storage_data=storage))
    records[INDEX] = write_file(folder / INDEX, content)
    records[_BACKEND] = write_file(folder / _BACKEND, _BACKEND_CONTENT)
    return records


PLAIN = (
    r"torch\.distributed\.checkpoint\.metadata\.(Metadata|MetadataIndex|StorageMeta|TensorProperties"
    r"|TensorStorageMetadata|BytesStorageMetadata|ChunkStorageMetadata|_MEM_FORMAT_ENCODING)"
    r"|torch\.distributed\.checkpoint\.filesystem\._StorageInfo"
    r"|torch\.(Size|float32|uint8|serialization\._get_layout)"
    r"|pathlib\.(_local\.)?PosixPath"
)
"""The classes that our metadata consists of."""


class _PlainUnpickler(pickle.Unpickler):
    """Builds the classes that a pattern names, and nothing else."""

    def __init__(self, file: IO[bytes], allowed: str) -> None:
        super().__init__(file)
        self._allowed = re.compile(allowed)

    def find_class(self, module: str, name: str) -> Any:
        if not self._allowed.fullmatch(f"{module}.{name}"):
            raise pickle.UnpicklingError(f"its metadata refers to {module}.{name}, which it has no use for")
        return super().find_class(module, name)


def read_metadata(path: Path, allowed: str = PLAIN) -> Metadata:
    """What a checkpoint's tensors are and where they lie.

    Raises:
        CheckpointError: it cannot be read, or there is more in it than that: it is a pickle that may come from anybody.
    """
    try:
        return _PlainUnpickler(io.BytesIO((path / INDEX).read_bytes()), allowed).load()
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path}: not a torch_dist checkpoint: {error}") from None


class Reader:
    """Reads any box of a checkpoint's tensors; holds one stored box at a time."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError as `read_metadata`."""
        self._path = path
        metadata = read_metadata(path)
        self._tensors: dict[str, Any] = metadata.state_dict_metadata
        self._storage: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
        self._last: tuple[_StorageInfo, Tensor] | None = None

    def shapes(self) -> dict[str, Shape]:
        """Of all tensors in the checkpoint, by name."""
        return {
            key: tuple(tensor.size)
            for key, tensor in self._tensors.items()
            if isinstance(tensor, TensorStorageMetadata)
        }

    def read(self, box: Box, out: Tensor) -> None:
        """Fill `out`, of the box's shape.

        Raises:
            CheckpointError: the checkpoint does not hold all of it, or holds a tensor of another shape.
        """
        tensor = self._tensors.get(box.key)
        if tensor is None or tuple(tensor.size) != box.whole:
            found = "not there" if tensor is None else f"of shape {list(tensor.size)} instead of {list(box.whole)}"
            raise CheckpointError(f"{self._path}: the tensor {box.key} is {found}")
        filled = 0
        for number, chunk in enumerate(tensor.chunks):
            low = [max(ours, theirs) for ours, theirs in zip(box.offset, chunk.offsets, strict=True)]
            high = [
                min(ours + size, theirs + stored)
                for ours, size, theirs, stored in zip(box.offset, box.shape, chunk.offsets, chunk.sizes, strict=True)
            ]
            if any(first >= last for first, last in zip(low, high, strict=True)):
                continue
            stored = self._stored(self._storage[MetadataIndex(box.key, chunk.offsets, number)])
            part = out[_slices(low, high, box.offset)]
            part.copy_(stored[_slices(low, high, chunk.offsets)])
            filled += part.numel()
        if filled != box.numel:
            raise CheckpointError(f"{self._path}: holds {filled} of the {box.numel} elements of a part of {box.key}")

    def _stored(self, info: _StorageInfo) -> Tensor:
        if self._last is None or self._last[0] is not info:
            self._last = None
            with (self._path / info.relative_path).open("rb") as file:
                file.seek(info.offset)
                content = io.BytesIO(file.read(info.length))
            self._last = info, torch.load(content, weights_only=True)
        return self._last[1]


def _slices(low: list[int], high: list[int], offset: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(first - base, last - base) for first, last, base in zip(low, high, offset, strict=True))
