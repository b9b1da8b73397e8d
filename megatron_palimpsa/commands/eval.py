"""`eval`: a trained model's results on tasks, and two models' losses by position."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_palimpsa.commands.prep_job import count


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "eval",
        help="results of a trained model on tasks, losses of two models by position",
        description="Evaluate trained models: a stage's folder, one of its checkpoints, or an export.",
    )
    kinds = parser.add_subparsers(title="what to do", metavar="WHAT", required=True)
    _add_run(kinds)
    _add_nll(kinds)


def _add_run(kinds: argparse._SubParsersAction) -> None:
    run = kinds.add_parser(
        "run",
        help="tasks of lm-evaluation-harness, RULER, LongBench v2",
        description="Evaluate a model task by task. What is done is kept: after a kill the same command goes on with "
        "the next task, and more tasks may follow into the same folder.",
    )
    run.add_argument("model", type=Path, metavar="MODEL", help="a stage's folder, one of its checkpoints, or an export")
    run.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="results.json, .md, .png, tasks/")
    run.add_argument(
        "--tasks",
        type=_names,
        required=True,
        metavar="NAME,...",
        help="`paper` (its eight), `ruler` (eleven, generated), ruler/NAME, `longbench_v2`, or tasks, tags and groups "
        "of lm-evaluation-harness",
    )
    run.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="data sets under their names on the hub (FOLDER/allenai/ai2_arc), longbench_v2.json, ruler/; without it "
        "lm-evaluation-harness asks the hub, or its cache",
    )
    run.add_argument(
        "--include",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="YAML files with more tasks for lm-evaluation-harness; may be repeated",
    )
    run.add_argument(
        "--lengths",
        type=_counts,
        default=(4096, 8192, 16384, 32768),
        metavar="N,...",
        help="tokens of RULER's samples, answer included (4096,8192,16384,32768)",
    )
    run.add_argument("--seed", type=_natural, default=0, metavar="N", help="of RULER's samples (%(default)s)")
    run.add_argument("--limit", type=count, metavar="N", help="items of each task (all; of RULER 500)")
    run.add_argument(
        "--fewshot", type=_natural, metavar="N", help="examples in the prompt (each task's own number, or none)"
    )
    run.add_argument(
        "--max-length",
        type=_natural,
        metavar="N",
        help="tokens of an input, 0 for any: texts are cut in pieces, contexts lose their beginning, LongBench's "
        "prompts their middle (the stage's seq_length; RULER has its own)",
    )
    _add_reading(run)
    run.set_defaults(command=_run)


def _add_nll(kinds: argparse._SubParsersAction) -> None:
    nll = kinds.add_parser(
        "nll",
        help="two models' losses by the position in the document",
        description="Mean NLL of two models by the position in the document on the same text, and the difference with "
        "its 95 % band over documents: nll.csv, nll.json, nll.png.",
    )
    nll.add_argument("a", type=Path, metavar="A", help="a stage's folder, one of its checkpoints, or an export")
    nll.add_argument("b", type=Path, metavar="B", help="the model that A is compared with")
    text = nll.add_mutually_exclusive_group(required=True)
    text.add_argument("--text", nargs="+", metavar="PATH", help="files, folders or globs, as `prep text` takes them")
    text.add_argument("--blend", type=Path, metavar="FILE", help="a blend of prepared sets")
    nll.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="where the results go")
    nll.add_argument("--text-column", default="text", metavar="NAME", help="of rows (%(default)s)")
    nll.add_argument("--documents", type=count, default=256, metavar="N", help="the first so many (%(default)s)")
    nll.add_argument("--length", type=count, default=4096, metavar="N", help="tokens of each at most (%(default)s)")
    nll.add_argument(
        "--stream", action="store_true", help="documents end to end in pieces of --length tokens, each as one document"
    )
    nll.add_argument("--bins", type=count, metavar="N", help="so many of equal width (widths that double)")
    _add_reading(nll)
    nll.set_defaults(command=_nll)


def _add_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--precision", choices=("bf16", "fp32"), help="of the weights (the stage's own)")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="in place of the model's own")
    parser.add_argument(
        "--batch-tokens", type=count, default=16384, metavar="N", help="go through the model at once (%(default)s)"
    )


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer from 0, not {text}")
    return int(text)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _counts(text: str) -> tuple[int, ...]:
    return tuple(count(part) for part in text.split(","))


def _run(options: argparse.Namespace) -> int:
    from megatron_palimpsa.evaluation.run import Reading, run
    from megatron_palimpsa.evaluation.tasks import Options

    chosen = Options(
        tasks=options.tasks,
        data=options.data,
        include=tuple(options.include),
        lengths=options.lengths,
        seed=options.seed,
        fewshot=options.fewshot,
        limit=options.limit,
    )
    reading = Reading(options.precision, options.max_length, options.batch_tokens, options.tokenizer)
    path = run(options.model, options.output, chosen, reading)
    print(f"\n{path.read_text()}\n{path}")
    return 0


def _nll(options: argparse.Namespace) -> int:
    from megatron_palimpsa.evaluation.documents import Text
    from megatron_palimpsa.evaluation.nll import compare

    source = Text(
        paths=tuple(options.text or ()),
        column=options.text_column,
        blend=options.blend,
        documents=options.documents,
        length=options.length,
        stream=options.stream,
    )
    settings = {name: getattr(options, name) for name in ("bins", "precision", "batch_tokens", "tokenizer")}
    compare((options.a, options.b), source, options.output, **settings)
    print(options.output / "nll.csv")
    return 0
