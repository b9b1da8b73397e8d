"""A model as it was published: where it lies, its config.json and its tensors, read some rows at a time."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from palimpsa_data.tokenizers.json_file import TOKENIZER_CONFIG
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_palimpsa.config import ConfigError


@dataclass(frozen=True)
class Stored:
    """A tensor in a file; only the rows asked for are read, and refused where they are no finite numbers."""

    shape: tuple[int, ...]
    rows: Callable[[slice], Tensor]


def locate(source: str) -> Path:
    """The folder `source`, or that of the model of this name on the Hugging Face hub, downloaded to its cache.

    Raises:
        ConfigError: it is neither.
    """
    if Path(source).is_dir():
        return Path(source)
    if source.count("/") != 1 or source.startswith((".", "/")):
        raise ConfigError(f"{source}: no such folder")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(f"{source}: no such folder; for names on the hub `pip install huggingface_hub`") from None
    try:
        settings = ["config.json", "tokenizer.json", TOKENIZER_CONFIG]
        folder = Path(snapshot_download(source, allow_patterns=[*settings, "model*.safetensors*"]))
        if not any(folder.glob("model*.safetensors")):
            folder = Path(snapshot_download(source, allow_patterns=[*settings, "pytorch_model*.bin*"]))
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{source}: no such folder, and not to be had from the Hugging Face hub: {reason}") from None
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file's mapping, with transformers' way of writing infinity understood.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        tree = json.loads(path.read_text(), object_hook=_number)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds no mapping")
    return tree


def _number(tree: dict[str, Any]) -> Any:
    return math.inf if tree == {"__float__": "Infinity"} else tree


def open_tensors(folder: Path) -> dict[str, Stored]:
    """All tensors of a model's safetensors or pickled files by name; pickles are loaded weights-only.

    Raises:
        ConfigError: there are none, or a file is missing or damaged.
    """
    for name, read in (("model.safetensors", _open_safetensors), ("pytorch_model.bin", _open_pickled)):
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return read(folder / name)
        if index.is_file():
            return _open_parts(index, read)
    raise ConfigError(f"{folder}: holds neither model.safetensors nor pytorch_model.bin, in one file or with an index")


def _open_parts(index: Path, read: Callable[[Path], dict[str, Stored]]) -> dict[str, Stored]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise ConfigError(f"{index}: weight_map is missing or does not say which file holds which tensor")
    found: dict[str, Stored] = {}
    for part in sorted(set(places.values())):
        if not part or Path(part).name != part:
            raise ConfigError(f"{index}: {part!r} is no name of a file in this folder")
        for name, stored in read(index.parent / part).items():
            if places.get(name, part) != part or name in found:
                raise ConfigError(f"{index}: {name} is in {part}, and not only in the file that weight_map says")
            found[name] = stored
    if missing := sorted(places.keys() - found.keys()):
        raise ConfigError(f"{index}: {missing[0]} is not in {places[missing[0]]}")
    return found


def _open_safetensors(path: Path) -> dict[str, Stored]:
    try:
        file = safe_open(path, framework="pt")
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: damaged or no safetensors file: {error}") from None
    return {name: Stored(tuple(part.get_shape()), partial(_rows, path, name, part)) for name, part in slices.items()}


def _open_pickled(path: Path) -> dict[str, Stored]:
    try:
        zipped = zipfile.is_zipfile(path)
        # A mapped file's checksums are not looked at by torch.
        if zipped and (damaged := zipfile.ZipFile(path).testzip()) is not None:
            raise ValueError(f"{damaged} does not match its checksum")
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # damaged bytes can lead to any
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{path}: damaged or no file of tensors alone: {reason}") from None
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.is_cpu
        for name, tensor in tensors.items()
    ):
        raise ConfigError(f"{path}: holds something else than dense tensors by name")
    return {name: Stored(tuple(tensor.shape), partial(_rows, path, name, tensor)) for name, tensor in tensors.items()}


def _rows(path: Path, name: str, tensor: Any, rows: slice) -> Tensor:
    try:
        value: Tensor = tensor[rows]
    except (RuntimeError, SafetensorError) as error:  # a kind of numbers that torch does not read
        raise ConfigError(f"{path}: {name} cannot be read: {str(error).partition(chr(10))[0]}") from None
    if not value.is_floating_point() or not value.float().isfinite().all():
        raise ConfigError(f"{path}: {name} holds something else than finite numbers")
    return value
