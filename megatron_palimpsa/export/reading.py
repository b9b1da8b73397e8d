"""An exported folder as it was written, or as transformers saved it again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from palimpsa_data.files import sha256_file
from torch import Tensor

from megatron_palimpsa.config import ConfigError, ModelConfig, StageConfig
from megatron_palimpsa.convert.named_tensors import check_tensors
from megatron_palimpsa.convert.sources import Stored, open_tensors, read_json
from megatron_palimpsa.convert.stage_folder import untrained_stage
from megatron_palimpsa.engine.boxes import Box
from megatron_palimpsa.export.names import lines, require_exportable, sizes
from megatron_palimpsa.export.settings import Dtype, dtype_of, is_exported, to_model, to_section
from megatron_palimpsa.export.tokenizer_files import original
from megatron_palimpsa.model.mamba2_names import Tensors

CHECKSUMS = "checksums.json"


def is_export(folder: Path) -> bool:
    """Whether a folder holds an exported model."""
    try:
        return is_exported(read_json(folder / "config.json"))
    except ConfigError:
        return False


@dataclass(frozen=True)
class Exported:
    """An exported model, none of whose weights is in memory."""

    folder: Path
    section: dict[str, Any]
    """The stage's `model:` section."""
    model: ModelConfig
    dtype: Dtype
    tensors: Mapping[str, Stored]
    tokenizer: Path | None
    """The file that its text was made with."""

    def read(self, box: Box, out: Tensor) -> None:
        """Fill `out` with a part of one of our unsplit tensors."""
        line = self._lines[box.key]
        start = line.rows(self._sizes).start + box.offset[0]
        rows = self.tensors[line.theirs].rows(slice(start, start + box.shape[0]))
        others = zip(box.offset[1:], box.shape[1:], strict=True)
        value = rows.squeeze(1) if line.is_filter else rows
        out.copy_(value[(slice(None), *(slice(first, first + size) for first, size in others))])

    def stage(self, output: Path) -> StageConfig:
        """A stage `output` with this model, in its dtype, and with a copy of the tokenizer."""
        return untrained_stage(self.section, output, self.tokenizer, str(self.folder), precision=self.dtype)

    @cached_property
    def _lines(self) -> dict[str, Tensors]:
        return {line.ours: line for line in lines(self.model)}

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return sizes(self.model)


def open_export(folder: Path) -> Exported:
    """An exported model, checked: its files by their checksums, where it has them, and its tensors by name and shape.

    Raises:
        ConfigError: it is of another architecture, or damaged.
    """
    where = folder / "config.json"
    config = read_json(where)
    section, model = to_section(config, str(where)), to_model(config, str(where))
    require_exportable(model, str(where))
    _check_files(folder)
    tensors = open_tensors(folder)
    check_tensors(tensors, lines(model), sizes(model), str(folder))
    return Exported(folder, section, model, dtype_of(config, str(where)), tensors, original(folder))


def _check_files(folder: Path) -> None:
    path = folder / CHECKSUMS
    if not path.is_file():
        return
    try:
        records = {str(name): str(record["sha256"]) for name, record in json.loads(path.read_text()).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    for name, checksum in records.items():
        if Path(name).name != name:
            raise ConfigError(f"{path}: {name!r} is no name of a file in this folder")
        try:
            found = sha256_file(folder / name)
        except OSError as error:
            raise ConfigError(f"{folder / name}: cannot be read: {error.strerror}") from None
        if found != checksum:
            raise ConfigError(
                f"{folder / name}: damaged, or changed since the export; where that was meant, remove {CHECKSUMS}"
            )
