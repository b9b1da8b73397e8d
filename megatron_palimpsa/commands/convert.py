"""`convert`: models as stages to start from, and what is to become of their layers."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_palimpsa.commands import convert_exports, convert_layers, convert_surgery


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "convert",
        help="make a stage to start from of a published model, or of another stage",
        description="Make a complete stage of a published model or of another stage; `init_from` takes its weights "
        "under any layout.",
    )
    models = parser.add_subparsers(title="what to convert", metavar="WHAT", required=True)
    mamba2 = models.add_parser(
        "mamba2",
        help="a Mamba2 model of state-spaces or Hugging Face",
        description="Convert a Mamba2 model of state-spaces or Hugging Face; its geometry is that of its config.json, "
        "and OUTPUT/model.yaml says it as a recipe does. Nothing is written where anything is wrong.",
    )
    mamba2.add_argument(
        "source", metavar="SOURCE", help="its folder, or its name on the Hugging Face hub (state-spaces/mamba2-2.7b)"
    )
    mamba2.add_argument("output", type=Path, metavar="OUTPUT", help="the stage's folder, for instance runs/mine/base")
    mamba2.set_defaults(command=_mamba2, appears_whole=True)
    convert_layers.add(models)
    convert_surgery.add(models)
    convert_exports.add(models)


def _mamba2(options: argparse.Namespace) -> int:
    from megatron_palimpsa.convert.mamba2 import convert
    from megatron_palimpsa.convert.stage_folder import MODEL_SECTION
    from megatron_palimpsa.training.parameters import count_parameters

    stage = convert(options.source, options.output)
    size = f"{len(stage.model.layers)} layers, {count_parameters(stage.model):,} parameters"
    print(f"{options.output}: {size} in {stage.train.precision} (train.precision), {MODEL_SECTION}")
    return 0
