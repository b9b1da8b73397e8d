"""Safetensors files written as the tensors come, some rows at a time.

A file is the length of its header (8 bytes, little-endian), the header (JSON: dtype, shape and place of each tensor)
and the tensors one after another; https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_palimpsa.training.checkpoint_files import FileRecord

MOST_BYTES = 4 * 10**9
"""Of a file's tensors."""
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Planned:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Values = Callable[[Planned], Iterable[Tensor]]
"""Gives a tensor's elements, in any dtype, as stretches in their order."""


def write_shards(folder: Path, tensors: list[Planned], values: Values) -> dict[str, FileRecord]:
    """Write model.safetensors, or several files and their index; -> the files by name.

    Raises:
        OSError: they could not be written.
    """
    parts = _split(tensors)
    if len(parts) == 1:
        return {"model.safetensors": _write(folder / "model.safetensors", tensors, values)}
    records: dict[str, FileRecord] = {}
    places: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        records[name] = _write(folder / name, part, values)
        places |= {tensor.name: name for tensor in part}
    index = {"metadata": {"total_size": sum(tensor.bytes for tensor in tensors)}, "weight_map": places}
    content = (json.dumps(index, indent=2) + "\n").encode()
    (folder / "model.safetensors.index.json").write_bytes(content)
    records["model.safetensors.index.json"] = FileRecord(len(content), hashlib.sha256(content).hexdigest())
    return records


def _split(tensors: list[Planned]) -> list[list[Planned]]:
    """In their order, as many together as fit into MOST_BYTES."""
    parts: list[list[Planned]] = [[]]
    room = MOST_BYTES
    for tensor in tensors:
        if tensor.bytes > room and parts[-1]:
            parts.append([])
            room = MOST_BYTES
        parts[-1].append(tensor)
        room -= tensor.bytes
    return parts


def _write(path: Path, tensors: list[Planned], values: Values) -> FileRecord:
    # The wide first: each begins at a multiple of its element's size.
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.bytes
        header[tensor.name] = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:

        def put(content: bytes | memoryview) -> None:
            nonlocal size
            digest.update(content)
            file.write(content)
            size += len(content)

        put(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            before = size
            for stretch in values(tensor):
                put(memoryview(stretch.to(tensor.dtype).contiguous().view(torch.uint8).numpy()).cast("B"))
            assert size - before == tensor.bytes, tensor.name
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(size, digest.hexdigest())
