"""`prep tokenizer`: a tokenizer trained on text of one's own."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_palimpsa.commands.prep_job import count


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "tokenizer",
        help="train a tokenizer",
        description="Train a tokenizer on the beginnings of the inputs; the same inputs give the same file.",
    )
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="as for `prep text`")
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="a .json (byte-level, GPT-NeoX type) or a .model (SentencePiece)",
    )
    parser.add_argument("--vocab-size", type=int, required=True, metavar="N", help="ids, control tokens included")
    parser.add_argument("--text-column", default="text", metavar="NAME", help="column of the text (%(default)s)")
    parser.add_argument(
        "--megabytes",
        type=count,
        default=500,
        metavar="N",
        help="text to train on, equally much of each input (%(default)s); training holds it in memory",
    )
    parser.set_defaults(command=_train)


def _train(arguments: argparse.Namespace) -> int:
    from palimpsa_data.sources import TextOptions, find_inputs
    from palimpsa_data.tokenizers.from_inputs import TrainingText, make_tokenizer

    options = TextOptions(text_column=arguments.text_column)
    inputs = find_inputs(arguments.inputs, options.loose)
    text = TrainingText(inputs, options, arguments.megabytes * 10**6)
    make_tokenizer(text, arguments.output, arguments.vocab_size, say=print)
    return 0
