"""`export`: a stage's model as a Hugging Face folder, which appears by one rename."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from palimpsa_data.files import sha256_file
from palimpsa_data.tokenizers import Tokenizer
from palimpsa_data.tokenizers.json_file import TOKENIZER_CONFIG
from torch import Tensor

from megatron_palimpsa.config import ConfigError, ModelConfig, StageConfig, load_stage
from megatron_palimpsa.convert.stage_folder import Telling, new_stage, require_new, stretches
from megatron_palimpsa.engine.boxes import Box, ReadBox
from megatron_palimpsa.export.model_card import model_card
from megatron_palimpsa.export.names import lines, require_exportable, sizes
from megatron_palimpsa.export.optional import require_transformers
from megatron_palimpsa.export.provenance import PROVENANCE, provenance_of, write_provenance
from megatron_palimpsa.export.reading import CHECKSUMS
from megatron_palimpsa.export.settings import Dtype, to_config, to_model
from megatron_palimpsa.export.shards import Planned, write_shards
from megatron_palimpsa.export.tokenizer_files import load_tokenizer, original, special_ids, write_tokenizer
from megatron_palimpsa.model.mamba2_names import Tensors
from megatron_palimpsa.training.blend_file import read_blend
from megatron_palimpsa.training.checkpoint_files import FileRecord
from megatron_palimpsa.training.checkpoint_format import CheckpointError, Reader
from megatron_palimpsa.training.checkpoint_state import differences, fingerprint, require_same_model
from megatron_palimpsa.training.saved import find_saved

logger = logging.getLogger(__name__)

_CODE = tuple(
    f"{part}_palimpsa.py"
    for part in ("configuration", "modeling", "layers", "attention", "mixers", "norms", "kernels", "scans")
)
_TORCH = {"bf16": torch.bfloat16, "fp32": torch.float32}


def export(
    source: Path, output: Path, dtype: Dtype | None = None, tokenizer: Path | None = None
) -> tuple[ModelConfig, Dtype]:
    """Write the model of a stage's folder, or of one of its checkpoints, as the folder `output`.

    Weights go through memory some rows of a stored tensor at a time.

    Args:
        dtype: of the weights but for those that stay fp32; None is the stage's precision (fp32 for fp16).
        tokenizer: its file, in place of the stage's.

    Returns:
        The model, and the dtype of its weights.

    Raises:
        ConfigError: there is no intact checkpoint, it cannot be exported, or `output` is there already.
        DataError: the tokenizer cannot be read.
        OSError: it cannot be written.
    """
    require_new(output)
    require_transformers()
    folder, checkpoint = find_saved(source)
    config = load_stage(folder.config)
    require_exportable(config.model, str(source))
    _require_said(config.model, str(source))
    require_same_model(checkpoint, config.model)
    dtype = dtype or ("bf16" if config.train.precision == "bf16" else "fp32")
    loaded = _tokenizer(config, tokenizer)
    provenance = provenance_of(folder, checkpoint, config)
    try:
        reader = Reader(checkpoint)
        _check_tensors(reader, config.model, checkpoint)
        with new_stage(output) as place:
            records = _write_weights(place.path, config.model, reader.read, dtype)
            _write_settings(place.path, config.model, dtype, loaded)
            write_provenance(place.path, provenance)
            _seal(place.path, records)
            card = model_card(config.model, dtype, output.name, loaded is not None, provenance)
            (place.path / "README.md").write_text(card)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    return config.model, dtype


def _require_said(model: ModelConfig, where: str) -> None:
    """Refuse a setting that changes the function and has no place in config.json."""
    said = to_model(to_config(model, "fp32", {}), where)
    if unsaid := differences(fingerprint(model), said, "in the stage"):
        raise ConfigError(f"{where}: cannot be exported: {unsaid.replace(' here', ' as exported')}")


def _tokenizer(config: StageConfig, path: Path | None) -> Tokenizer | None:
    if path is None and not config.data.tokenizer:
        return None
    tokenizer = load_tokenizer(path or Path(config.data.tokenizer), config.model.vocab_size)
    for made_with in _tokenizers_of_the_data(config):
        if made_with != tokenizer.sha256:
            raise ConfigError(f"{tokenizer.path}: not the tokenizer of the data in {config.data.train_blend}")
    return tokenizer


def _tokenizers_of_the_data(config: StageConfig) -> Iterator[str]:
    """Checksums of the tokenizers that the sets of the training blend were made with, where they still lie there."""
    from palimpsa_data import DataError
    from palimpsa_data.sets import read_set

    if not Path(config.data.train_blend).is_file():
        return
    for entry in read_blend(Path(config.data.train_blend), "data.train_blend"):
        try:
            yield read_set(entry.folder).tokenizer.sha256
        except DataError:
            logger.info("%s is not there: whether it was made with this tokenizer is not known", entry.folder)


def _check_tensors(reader: Reader, model: ModelConfig, checkpoint: Path) -> None:
    """Raises CheckpointError where one is missing or of another shape, before anything is written."""
    size, found = sizes(model), reader.shapes()
    for line in lines(model):
        shape = _our_shape(line, size)
        if found.get(line.ours) != shape:
            there = f"is {list(found[line.ours])} and not {list(shape)}" if line.ours in found else "is missing"
            raise CheckpointError(f"{checkpoint}: {line.ours} {there}")


def _our_shape(line: Tensors, size: dict[str, int]) -> tuple[int, ...]:
    rows = line.rows(size)
    return rows.stop - rows.start, *(size[name] for name in line.shape[1:] if name != "one")


def _write_weights(folder: Path, model: ModelConfig, read: ReadBox, dtype: Dtype) -> dict[str, FileRecord]:
    from megatron_palimpsa.hf.mixers_palimpsa import FP32_PARAMETERS

    size = sizes(model)
    table: dict[str, list[Tensors]] = {}
    for line in lines(model):
        table.setdefault(line.theirs, []).append(line)
    planned = [
        Planned(
            name,
            parts[0].their_shape(size),
            torch.float32 if name.rpartition(".")[2] in FP32_PARAMETERS else _TORCH[dtype],
        )
        for name, parts in table.items()
    ]
    telling = Telling(sum(tensor.bytes for tensor in planned))

    def values(tensor: Planned) -> Iterable[Tensor]:
        for line in table[tensor.name]:
            for value in _stretches_of(line, size, read):
                yield value
                telling.add(value.numel() * tensor.dtype.itemsize)

    return write_shards(folder, planned, values)


def _stretches_of(line: Tensors, size: dict[str, int], read: ReadBox) -> Iterator[Tensor]:
    whole = _our_shape(line, size)
    for part in stretches(slice(0, whole[0]), *whole[1:]):
        shape = (part.stop - part.start, *whole[1:])
        value = torch.empty(shape)
        read(Box(line.ours, whole, (part.start, *[0] * (len(whole) - 1)), shape), value)
        yield value


def _write_settings(folder: Path, model: ModelConfig, dtype: Dtype, tokenizer: Tokenizer | None) -> None:
    import transformers

    from megatron_palimpsa import hf

    version = {"transformers_version": transformers.__version__}
    ids = {} if tokenizer is None else special_ids(tokenizer)
    _write_json(folder / "config.json", to_config(model, dtype, ids) | version)
    _write_json(folder / "generation_config.json", ids | version)
    for name in _CODE:
        shutil.copyfile(Path(hf.__file__).parent / name, folder / name)
    if tokenizer is not None:
        write_tokenizer(tokenizer, folder)


def _seal(folder: Path, records: dict[str, FileRecord]) -> None:
    """Write the checksums of what makes a stage of the folder again: weights, settings, tokenizer, provenance."""
    read_back = [folder / name for name in ("config.json", TOKENIZER_CONFIG, PROVENANCE)] + [original(folder)]
    found = [path for path in read_back if path is not None and path.is_file()]
    records = records | {path.name: FileRecord(path.stat().st_size, sha256_file(path)) for path in found}
    _write_json(folder / CHECKSUMS, {name: asdict(records[name]) for name in sorted(records)})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
