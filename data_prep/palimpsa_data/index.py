"""Orders and packings of a set, built once and memory-mapped by every rank of a training job.

    SET/index/NAME.ARRAY.npy   one numpy array each (no pickles)
    SET/index/NAME.json        the set it belongs to, bytes and SHA-256 of the arrays; written last

NAME says everything else that the arrays depend on: packing, version of the algorithm, sequence length or seed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from palimpsa_data.errors import DataError
from palimpsa_data.files import fsync, json_bytes, publish, read_json, sha256_file, temporary, write_atomically
from palimpsa_data.locks import lock
from palimpsa_data.packing import ArrayMap
from palimpsa_data.sets import SetReader, Share

FORMAT = 1
_REMEDY = "remove the folder and run `prep index` again"


def find_index_problems(folder: Path) -> list[str]:
    """What is wrong with the index of an intact set; empty where all is well, or there is none."""
    try:
        SetIndex(SetReader(folder, checksums=False), Share())
    except DataError as error:
        return [str(error)]
    return []


class SetIndex:
    """An `Arrays` of one set (see `palimpsa_data.packing`); `built` names what had to be built in memory or written.

    Args:
        share: which of the files are compared with their checksums, at once, unless they are to be written.
        write: what is missing, damaged or of another content of the set is written.

    Raises:
        DataError: a file of the set as it is now is not as its record says.
    """

    def __init__(self, reader: SetReader, share: Share, *, write: bool = False) -> None:
        self.folder = reader.folder / "index"
        self.built: list[str] = []
        self._set_sha256, self._write = reader.sha256, write
        if not write:
            for number, record in enumerate(sorted(self.folder.glob("*.json"))):
                self._check(record, checksums=share.has(number))

    def __call__(self, name: str, build: Callable[[], ArrayMap]) -> ArrayMap:
        """The arrays `name`, memory-mapped where the folder holds them.

        Raises:
            DataError: a file cannot be read or written.
        """
        record = self.folder / f"{name}.json"
        if self._write and not self._is_whole(record):
            self._write_once(name, record, build)
        files = self._read(record)
        if files is None:
            self.built.append(name)
            return build()
        return {array: np.load(self._path(name, array), mmap_mode="r", allow_pickle=False) for array in files}

    def _path(self, name: str, array: str) -> Path:
        return self.folder / f"{name}.{array}.npy"

    def _is_whole(self, record: Path) -> bool:
        try:
            self._check(record, checksums=True)
            return self._read(record) is not None
        except DataError:
            return False

    def _read(self, record: Path) -> dict[str, dict[str, Any]] | None:
        """Array names with bytes and SHA-256; None where there are none of the set as it is."""
        if not record.is_file():
            return None
        content = read_json(record)
        if (content.get("format"), content.get("set_sha256")) != (FORMAT, self._set_sha256):
            return None
        return content.get("arrays")

    def _check(self, record: Path, *, checksums: bool) -> None:
        try:
            for array, file in (self._read(record) or {}).items():
                path = self._path(record.stem, array)
                if path.stat().st_size != file["bytes"]:
                    raise DataError(f"{path}: truncated or exchanged; {_REMEDY}")
                if checksums and sha256_file(path) != file["sha256"]:
                    raise DataError(f"{path}: content differs from {record}; {_REMEDY}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{record}: the files it names cannot be read ({error}); {_REMEDY}") from None

    def _write_once(self, name: str, record: Path, build: Callable[[], ArrayMap]) -> None:
        try:
            self.folder.mkdir(exist_ok=True)
            with lock(self.folder / "index.lock", wait=True):
                if not self._is_whole(record):  # by whoever held the lock
                    self.built.append(name)
                    self._save(name, build())
        except OSError as error:
            raise DataError(
                f"cannot write the index {record}: {error.strerror}; make space or change rights"
            ) from error

    def _save(self, name: str, arrays: ArrayMap) -> None:
        files = {}
        for array, values in arrays.items():
            path = self._path(name, array)
            with temporary(path).open("wb") as file:
                _write_array(file, np.ascontiguousarray(values))
            fsync(temporary(path))
            files[array] = {"bytes": temporary(path).stat().st_size, "sha256": sha256_file(temporary(path))}
            publish(path)
        record = {"format": FORMAT, "set_sha256": self._set_sha256, "arrays": files}
        write_atomically(self.folder / f"{name}.json", json_bytes(record))


def _write_array(file: BinaryIO, values: np.ndarray) -> None:
    """What `np.save` writes, which does not notice a disk that has no room for the last few KiB."""
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(values))
    file.write(values.reshape(-1).view(np.uint8))
