"""`convert huggingface`: an exported model as a complete stage, to train on."""

from __future__ import annotations

from pathlib import Path

from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.convert.named_tensors import boxes
from megatron_palimpsa.convert.stage_folder import complete, new_stage, require_new, write_checkpoint
from megatron_palimpsa.export.names import lines, sizes
from megatron_palimpsa.export.provenance import read_provenance, write_provenance
from megatron_palimpsa.export.reading import open_export
from megatron_palimpsa.export.tokenizer_files import load_tokenizer
from megatron_palimpsa.training.parameters import count_parameters


def convert(folder: Path, output: Path) -> StageConfig:
    """Write the model that `export` wrote to `folder` as the complete stage `output`, which is returned.

    Its weights are those of the folder, bit for bit, in float32; they go through memory some rows at a time.

    Raises:
        ConfigError: it is no exported model, is damaged, or `output` is there already.
        DataError: its tokenizer cannot be read.
        OSError: it cannot be written.
    """
    require_new(output)
    exported = open_export(folder)
    provenance = read_provenance(folder)
    stage = exported.stage(output)
    if exported.tokenizer is not None:
        load_tokenizer(exported.tokenizer, stage.model.vocab_size)
    size = sizes(stage.model)
    with new_stage(output) as run:
        values = boxes(exported.tensors, lines(stage.model), size, size)
        write_checkpoint(run, stage.model, values, elements=count_parameters(stage.model))
        complete(run, stage, exported.section, exported.tokenizer)
        write_provenance(run.path, provenance)
    return stage
