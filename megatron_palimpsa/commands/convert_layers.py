"""`convert select-layers`: which Mamba2 layers of a model to give importance."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_palimpsa.commands.prep_job import count


def add(models: argparse._SubParsersAction) -> None:
    select = models.add_parser(
        "select-layers",
        help="measure how long each layer remembers on sample text and choose those to turn into P",
        description="Measure the memory windows N_t = 1 / (1 - alpha_t) of a stage's layers on sample text and choose "
        "the Mamba2 layers with the largest medians over heads and tokens. OUTPUT gets pattern.yaml, layers.csv, "
        "heads.csv and two pictures.",
    )
    select.add_argument("stage", type=Path, metavar="STAGE", help="its folder, or one of its checkpoints")
    select.add_argument("--layers", type=count, required=True, metavar="K", help="choose so many")
    select.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="what to write; must be new")
    text = select.add_mutually_exclusive_group(required=True)
    text.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text to measure on, from its beginning")
    text.add_argument("--blend", type=Path, metavar="FILE", help="a blend of prepared sets to measure on instead")
    select.add_argument("--tokenizer", type=Path, metavar="FILE", help="the model's (default: the stage's)")
    select.add_argument("--tokens", type=count, default=16384, metavar="N", help="at most so many (%(default)s)")
    select.add_argument(
        "--seq-length",
        type=count,
        default=2048,
        metavar="N",
        help="in rows of so many, each from no memory (%(default)s)",
    )
    select.add_argument("--precision", choices=("bf16", "fp32"), help="to compute in (default: the stage's)")
    select.set_defaults(command=_select, appears_whole=True)


def _select(options: argparse.Namespace) -> int:
    from megatron_palimpsa.convert.sample import Sample
    from megatron_palimpsa.convert.select_layers import select_layers
    from megatron_palimpsa.convert.selection import PATTERN, table

    sample = Sample(options.text or options.blend, options.text is None, options.tokens, options.seq_length)
    selection = select_layers(
        options.stage,
        sample,
        options.layers,
        options.output,
        precision=options.precision,
        tokenizer=options.tokenizer,
    )
    print(table(selection))
    print(f"{options.output / PATTERN}: {selection.pattern}")
    return 0
