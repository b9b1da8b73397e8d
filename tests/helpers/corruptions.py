"""Ways in which a prepared set goes bad that Megatron's readers do not see, each with the file that is to be named."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from palimpsa_data.files import json_bytes, sha256_file
from palimpsa_data.sets import TokenizerInfo

from helpers.datasets import tiny_set


@dataclass(frozen=True)
class Corruption:
    """`apply` damages the second shard of a `write_sealed_set` (or both); `suffix` is of the file that it changes."""

    name: str
    apply: Callable[[Path], None]
    suffix: str

    @property
    def named(self) -> str:
        """What a message about it has to hold."""
        return self.suffix if self.suffix == "set.json" else "-00001-of-00002"


def _path(folder: Path, shard: int, suffix: str) -> Path:
    return folder / f"{folder.name}-0000{shard}-of-00002{suffix}"


def _truncated(folder: Path, suffix: str) -> None:
    path = _path(folder, 1, suffix)
    path.write_bytes(path.read_bytes()[:-2])


def _swapped(folder: Path, suffix: str) -> None:
    first, second = (_path(folder, shard, suffix) for shard in range(2))
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


def _flipped(folder: Path, suffix: str) -> None:
    """One bit, in the middle."""
    path = _path(folder, 1, suffix)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _missing(folder: Path, suffix: str) -> None:
    _path(folder, 1, suffix).unlink()


def _edited(folder: Path, suffix: str) -> None:
    path = _path(folder, 1, suffix)
    content = json.loads(path.read_bytes())
    content["documents"] += 1
    path.write_bytes(json_bytes(content))


def _foreign(folder: Path, suffix: str) -> None:
    """A shard of another tokenizer, its manifest and set.json consistent with it."""
    path = _path(folder, 1, suffix)
    content = json.loads(path.read_bytes())
    content["spec"]["tokenizer_sha256"] = "0" * 64
    path.write_bytes(json_bytes(content))
    reseal(folder)


def _over_vocabulary(folder: Path, suffix: str) -> None:
    """Ids that no checksum gives away: made by a writer that did not look."""
    path = _path(folder, 1, suffix)
    tokens = np.fromfile(path, np.uint16)
    tokens[len(tokens) // 2] = 60_000
    tokens.tofile(path)
    reseal(folder)


def _wrong_lengths(folder: Path, suffix: str) -> None:
    """Two documents' border moved by a token, checksums brought in line."""
    path = _path(folder, 1, suffix)
    content = bytearray(path.read_bytes())
    lengths = np.frombuffer(content, np.int32, 2, 34)
    lengths += np.array([1, -1], np.int32)
    path.write_bytes(content)
    reseal(folder)


def _totals(folder: Path, suffix: str) -> None:
    path = folder / suffix
    content = json.loads(path.read_bytes())
    content["tokens"] -= 1
    path.write_bytes(json_bytes(content))


def reseal(folder: Path) -> None:
    """Bring the checksums of manifests and set.json in line with what the files hold now."""
    info = json.loads((folder / "set.json").read_bytes())
    for entry in info["shards"]:
        path = folder / f"{entry['name']}.manifest.json"
        manifest = json.loads(path.read_bytes())
        for name, output in manifest["outputs"].items():
            output["sha256"] = sha256_file(folder / name)
        path.write_bytes(json_bytes(manifest))
        entry["manifest_sha256"] = sha256_file(path)
    (folder / "set.json").write_bytes(json_bytes(info))


_CHANGES: list[tuple[Callable[[Path, str], None], tuple[str, ...]]] = [
    (_truncated, (".bin", ".idx", ".mask.bin", ".manifest.json")),
    (_flipped, (".bin", ".idx", ".mask.bin", ".manifest.json")),
    (_missing, (".bin", ".idx", ".mask.bin", ".manifest.json")),
    (_swapped, (".bin", ".idx", ".mask.bin", ".manifest.json")),
    (_edited, (".manifest.json",)),
    (_foreign, (".manifest.json",)),
    (_over_vocabulary, (".bin",)),
    (_wrong_lengths, (".idx",)),
    (_totals, ("set.json",)),
]

CORRUPTIONS = [
    Corruption(f"{change.__name__.strip('_')} {suffix}", functools.partial(change, suffix=suffix), suffix)
    for change, suffixes in _CHANGES
    for suffix in suffixes
]

_LENGTHS = [5, 9, 3, 12, 7], [9, 5, 3, 7, 12]


def write_sealed_set(folder: Path, tokenizer: TokenizerInfo) -> None:
    """A set of two shards of one size, so that swapped files betray themselves by nothing but their content."""
    draw = np.random.default_rng(5)
    lengths = [length for part in _LENGTHS for length in part]
    documents = [[*draw.integers(4, tokenizer.vocab_size, length - 1).tolist(), 2] for length in lengths]
    masks = [[0, *draw.integers(0, 2, length - 1).tolist()] for length in lengths]
    tiny_set(folder, documents, tokenizer, masks, shards=2)
