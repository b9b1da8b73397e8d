"""`export`: a stage's model as a Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "export",
        help="a trained model as a folder for Hugging Face's transformers",
        description="Write a stage's model as a folder that AutoModelForCausalLM and AutoTokenizer load: safetensors, "
        "settings, tokenizer, the model's code and a model card. Nothing is written where anything is wrong.",
    )
    parser.add_argument(
        "source",
        type=Path,
        metavar="STAGE_OR_CHECKPOINT",
        help="for instance runs/demo/instruct, or checkpoints/step-N there",
    )
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="the new folder")
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp32"),
        help="of the weights, but for the few that stay fp32 (the stage's train.precision)",
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="where the stage's data.tokenizer is not where it was"
    )
    parser.set_defaults(command=_export)


def _export(options: argparse.Namespace) -> int:
    from megatron_palimpsa.export.write import export
    from megatron_palimpsa.training.parameters import count_parameters

    model, dtype = export(options.source, options.output, options.dtype, options.tokenizer)
    hint = "" if dtype == "fp32" else " (--dtype fp32 keeps what training has)"
    size = f"{len(model.layers)} layers, {count_parameters(model):,} parameters in {dtype}"
    print(f"{options.output}: {size}{hint}, README.md")
    return 0
