"""`convert mamba2`: a published Mamba2 model as a complete stage, whose weights another takes by `init_from`.

Everything is checked before anything is written, and the stage's folder appears by one rename. The weights go through
memory some rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_palimpsa.config import ConfigError, ModelConfig, StageConfig, check_stage, stage_from_dict
from megatron_palimpsa.convert.mamba2_config import Geometry, read_geometry
from megatron_palimpsa.convert.sources import Stored, locate, open_tensors, read_json
from megatron_palimpsa.convert.stage_folder import complete, new_stage, require_new, stretches, write_checkpoint
from megatron_palimpsa.engine.boxes import Box
from megatron_palimpsa.model.mamba2_names import lines, sizes
from megatron_palimpsa.model.naming import OUTPUT
from megatron_palimpsa.training.parameters import count_parameters

_SEQ_LENGTH = 2048
"""Of the stage's own settings, which nothing is trained with: no weight depends on it."""
_HEAD, _EMBEDDINGS = "lm_head.weight", "backbone.embeddings.weight"
_ALSO_NAMED = {"backbone.embedding.weight": _EMBEDDINGS}
"""state-spaces' name -> Hugging Face's, where they differ."""


def convert(source: str, output: Path) -> StageConfig:
    """Write the model `source` (a folder, or a name on the hub) as the complete stage `output`, which is returned.

    `output/model.yaml` is the stage's `model:` section, for recipes to inherit by `base:`; they give `seq_length`.

    Raises:
        ConfigError: it is not a Mamba2 model that ours computes, is damaged, or `output` is there already.
        OSError: it cannot be written.
    """
    require_new(output)
    folder = locate(source)
    geometry = read_geometry(read_json(folder / "config.json"), str(folder / "config.json"))
    tokenizer = folder / "tokenizer.json"
    stage = _stage(geometry, output, tokenizer.is_file(), f"{source} -> {output}")
    if tokenizer.is_file():
        _check_tokenizer(tokenizer, stage.model.vocab_size)
    tensors = {_ALSO_NAMED.get(name, name): stored for name, stored in open_tensors(folder).items()}
    _check_tensors(tensors, stage.model, geometry.vocabulary_rows, source)

    with new_stage(output) as run:
        values = _boxes(stage.model, tensors, geometry.vocabulary_rows)
        write_checkpoint(run, stage.model, values, elements=count_parameters(stage.model))
        complete(run, stage, geometry.section, tokenizer if tokenizer.is_file() else None)
    return stage


def _stage(geometry: Geometry, output: Path, has_tokenizer: bool, where: str) -> StageConfig:
    tokenizer = str(output / "tokenizer.json") if has_tokenizer else ""
    tree = {
        "name": output.name,
        "output_dir": str(output.parent),
        "model": {**geometry.section, "seq_length": _SEQ_LENGTH},
        "data": {"train_blend": "", "valid_blend": "", "tokenizer": tokenizer},
        "train": {"tokens": _SEQ_LENGTH, "global_batch_tokens": _SEQ_LENGTH},
        "optimizer": {"lr": 1e-4, "warmup_steps": 0},
    }
    stage = stage_from_dict(tree, where)
    check_stage(stage)
    return stage


def _check_tokenizer(path: Path, vocab_size: int) -> None:
    tree = read_json(path)
    try:
        vocabulary = tree["model"]["vocab"]
        # A Unigram model's ids are places in a list.
        ids = [*vocabulary.values()] if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
        largest = max(int(number) for number in (*ids, *(token["id"] for token in tree["added_tokens"])))
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{path}: not a tokenizer of Hugging Face's tokenizers") from None
    if largest >= vocab_size:
        raise ConfigError(f"{path}: has ids up to {largest}, the model knows {vocab_size} of them")


def _check_tensors(tensors: Mapping[str, Stored], model: ModelConfig, vocabulary: int, source: str) -> None:
    size = sizes(model) | {"vocabulary": vocabulary}
    wanted = {line.theirs: line.their_shape(size) for line in lines(model)}
    # Tied, it may be written out all the same.
    allowed = wanted if OUTPUT in wanted else {**wanted, _HEAD: (vocabulary, model.hidden_size)}
    problems = [f"{name} is missing" for name in wanted if name not in tensors]
    problems += [f"{name} is not known" for name in sorted(tensors.keys() - allowed.keys())]
    problems += [
        f"{name} is {list(tensors[name].shape)} and not {list(shape)}"
        for name, shape in allowed.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ConfigError(f"{source}: not the tensors of its config.json: {'; '.join(problems[:5])}{more}")
    if model.tie_embeddings and _HEAD in tensors:
        for rows in stretches(slice(0, vocabulary), model.hidden_size):
            if not torch.equal(tensors[_HEAD].rows(rows), tensors[_EMBEDDINGS].rows(rows)):
                raise ConfigError(f"{source}: {_HEAD} is not {_EMBEDDINGS}, to which config.json ties it")


def _boxes(model: ModelConfig, tensors: Mapping[str, Stored], vocabulary: int) -> Iterator[tuple[Box, Tensor]]:
    """All of our tensors in float32; vocabulary rows that theirs lack are zero."""
    ours, theirs = sizes(model), sizes(model) | {"vocabulary": vocabulary}
    for line in lines(model):
        taken = line.rows(theirs)
        rows, width = line.rows(ours), [ours[name] for name in line.shape[1:] if name != "one"]
        whole = (rows.stop - rows.start, *width)
        for part in stretches(taken, *width):
            value = tensors[line.theirs].rows(part).float().reshape(part.stop - part.start, *width)
            if part.stop == taken.stop and rows.stop > taken.stop:
                value = F.pad(value, (0, 0, 0, rows.stop - taken.stop))
            yield Box(line.ours, whole, (part.start - taken.start, *[0] * len(width)), tuple(value.shape)), value
