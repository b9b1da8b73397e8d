"""`convert huggingface`, an export as a stage, and `convert verify`, whether two models compute the same."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(models: argparse._SubParsersAction) -> None:
    _add_huggingface(models)
    _add_verify(models)


def _add_huggingface(models: argparse._SubParsersAction) -> None:
    parser = models.add_parser(
        "huggingface",
        help="a model that `export` wrote",
        description="Make a stage of a model that `export` wrote, or that transformers saved again. The weights are "
        "those of the folder, bit for bit. Nothing is written where anything is wrong.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="what `export` wrote")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="the stage's folder, for instance runs/mine/base")
    parser.set_defaults(command=_huggingface, appears_whole=True)


def _add_verify(models: argparse._SubParsersAction) -> None:
    parser = models.add_parser(
        "verify",
        help="whether two models compute the same: source and stage, stage and export",
        description="Compare the logits of two models on one document, each run by its own implementation in float32, "
        "one after the other. Exit code 0: the same but for rounding; 1: not.",
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a published Mamba2 model (folder or hub name), a stage, a checkpoint or an export",
    )
    parser.add_argument("target", type=Path, metavar="STAGE_OR_EXPORT", help="what was made of it")
    parser.add_argument("--text", type=Path, metavar="FILE", help="the document (default: ids at random)")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="of the document, at most (%(default)s)")
    parser.set_defaults(command=_verify)


def _huggingface(options: argparse.Namespace) -> int:
    from megatron_palimpsa.convert.huggingface import convert
    from megatron_palimpsa.convert.stage_folder import MODEL_SECTION
    from megatron_palimpsa.training.parameters import count_parameters

    model = convert(options.folder, options.output).model
    print(f"{options.output}: {len(model.layers)} layers, {count_parameters(model):,} parameters, {MODEL_SECTION}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    from megatron_palimpsa.convert.surgery import REPORT
    from megatron_palimpsa.export.verify import TOLERANCE, verify
    from megatron_palimpsa.training.exit_codes import ExitCode
    from megatron_palimpsa.training.saved import stage_of_checkpoint

    found = verify(options.source, options.target, options.text, options.tokens)
    print(
        f"largest difference of a logit {found.difference:.1e} beside logits up to {found.largest:.3g} "
        f"(allowed: {TOLERANCE:.0e} of those, {TOLERANCE * found.largest:.1e}); "
        f"the likeliest id is the same at {found.agreeing} of {found.tokens} tokens"
    )
    if found.passed:
        print("PASS: the same function")
        return ExitCode.COMPLETE
    report = (stage_of_checkpoint(options.target) or options.target) / REPORT
    meant = f"; {report} says what its conversion changed on purpose" if report.is_file() else ""
    print(f"FAIL: another function{meant}")
    return ExitCode.FAILED
