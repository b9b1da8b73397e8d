"""`convert mamba2`: a published Mamba2 model as a complete stage, whose weights another takes by `init_from`.

Everything is checked before anything is written, and the stage's folder appears by one rename. The weights go through
memory some rows at a time.
"""

from __future__ import annotations

from pathlib import Path

from palimpsa_data.tokenizers.json_file import TOKENIZER_CONFIG

from megatron_palimpsa.config import ConfigError, StageConfig
from megatron_palimpsa.convert.mamba2_config import read_geometry
from megatron_palimpsa.convert.named_tensors import EMBEDDINGS, boxes, check_tensors
from megatron_palimpsa.convert.sources import locate, open_tensors, read_json
from megatron_palimpsa.convert.stage_folder import complete, new_stage, require_new, untrained_stage, write_checkpoint
from megatron_palimpsa.model.mamba2_names import lines, sizes
from megatron_palimpsa.training.parameters import count_parameters

ALSO_NAMED = {"backbone.embedding.weight": EMBEDDINGS}
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
    tokenizer = folder / "tokenizer.json" if (folder / "tokenizer.json").is_file() else None
    stage = untrained_stage(geometry.section, output, tokenizer, f"{source} -> {output}")
    if tokenizer is not None:
        _check_tokenizer(tokenizer, stage.model.vocab_size)
    tensors = {ALSO_NAMED.get(name, name): stored for name, stored in open_tensors(folder).items()}
    table, ours = lines(stage.model), sizes(stage.model)
    theirs = ours | {"vocabulary": geometry.vocabulary_rows}
    check_tensors(tensors, table, theirs, source)

    with new_stage(output) as run:
        values = boxes(tensors, table, ours, theirs)
        write_checkpoint(run, stage.model, values, elements=count_parameters(stage.model))
        complete(run, stage, geometry.section, tokenizer)
    return stage


def _check_tokenizer(path: Path, vocab_size: int) -> None:
    tree = read_json(path)
    if (beside := path.with_name(TOKENIZER_CONFIG)).is_file():
        read_json(beside)
    try:
        vocabulary = tree["model"]["vocab"]
        # A Unigram model's ids are places in a list.
        ids = [*vocabulary.values()] if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
        largest = max(int(number) for number in (*ids, *(token["id"] for token in tree["added_tokens"])))
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ConfigError(f"{path}: not a tokenizer of Hugging Face's tokenizers") from None
    if largest >= vocab_size:
        raise ConfigError(f"{path}: has ids up to {largest}, the model knows {vocab_size} of them")
