"""`convert palimpsa` and `convert without-importance`: a stage with other layers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_palimpsa.convert.layers import Turn


def add(models: argparse._SubParsersAction) -> None:
    palimpsa = models.add_parser(
        "palimpsa",
        help="layers of a stage with importance: Mamba2 as Palimpsa-M, L as Palimpsa-D",
        description="Turn layers of a stage that have no importance into Palimpsa layers, M (Mamba2) into P and L "
        "(Palimpsa-D without importance) into Q: all weights stay as they are, with Adam's moments where the stage was "
        "trained, and importance starts as for models that were pretrained. The new stage is compared with the old one "
        "on a sample: equal without importance, or nothing is written; how far with it is printed. "
        "OUTPUT/conversion.json has all of it.",
    )
    _add_common(palimpsa, required=True)
    palimpsa.add_argument("--beta-rank", type=int, metavar="N", help="of beta's projection (PATTERN's or SOURCE's)")
    palimpsa.add_argument(
        "--beta-scale-init",
        choices=("scratch", "finetune", "finetune-effective"),
        help="as model.beta_scale_init (PATTERN's or finetune)",
    )
    palimpsa.add_argument("--seed", type=int, metavar="N", help="of the new parameters (SOURCE's)")
    palimpsa.set_defaults(command=_palimpsa, appears_whole=True)
    without = models.add_parser(
        "without-importance",
        help="the way back: Palimpsa layers of a stage without their importance",
        description="Turn Palimpsa layers of a stage into what they are without importance, P into M (Mamba2) and Q "
        "into L: the weights of importance are dropped, all others stay as they are. Compared and reported as by "
        "`convert palimpsa`.",
    )
    _add_common(without, required=False)
    without.set_defaults(command=_without_importance, appears_whole=True)


def _add_common(parser: argparse.ArgumentParser, required: bool) -> None:
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="a complete stage's folder, or STAGE/checkpoints/step-N"
    )
    parser.add_argument(
        "output", type=Path, metavar="OUTPUT", help="the new stage's folder, for instance runs/2.7b/base"
    )
    which = parser.add_mutually_exclusive_group(required=required)
    every = "" if required else "; all of them where neither is given"
    which.add_argument("--layers", metavar="4,8,...", help=f"the layers to turn, counted from 1{every}")
    which.add_argument(
        "--pattern",
        metavar="PATTERN",
        help="the new stage's pattern (MMMP...), or a YAML file whose model.pattern it is: what `convert "
        "select-layers` writes, or a recipe, whose other model settings count too",
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="compare on the first 512 tokens of this file (a text that comes along)",
    )


def _palimpsa(options: argparse.Namespace) -> int:
    from megatron_palimpsa.convert.layers import WITH_IMPORTANCE, Turn

    given = {"beta_rank": options.beta_rank, "beta_scale_init": options.beta_scale_init}
    given = {name: value for name, value in given.items() if value is not None}
    defaults = {"beta_scale_init": "finetune"}
    return _turn(options, Turn(WITH_IMPORTANCE, options.layers, options.pattern, defaults, given), options.seed)


def _without_importance(options: argparse.Namespace) -> int:
    from megatron_palimpsa.convert.layers import WITHOUT_IMPORTANCE, Turn

    return _turn(options, Turn(WITHOUT_IMPORTANCE, options.layers, options.pattern), None)


def _turn(options: argparse.Namespace, turn: Turn, seed: int | None) -> int:
    from megatron_palimpsa.convert.stage_folder import MODEL_SECTION
    from megatron_palimpsa.convert.surgery import REPORT, turn_layers

    report = turn_layers(options.source, options.output, turn, seed, options.text)
    count, zero, importance = report["parameters"], report["importance_zero"], report["importance"]
    layers = ", ".join(map(str, report["layers"]))
    moments = "with Adam's moments" if report["moments"] else "without moments"
    print(f"{options.output}: {report['pattern']['after']}, turned layers: {layers}")
    print(f"{options.output}/{MODEL_SECTION} is for recipes, {REPORT} says what follows")
    print(
        f"parameters: {count['carried']:,} carried over {moments}, {count['new']:,} new, {count['dropped']:,} dropped"
    )
    print(
        f"logits on {report['sample']['tokens']} tokens ({report['sample']['of']}), with Palimpsa layers from without:"
    )
    print(
        f"  importance 0  largest difference {zero['largest']:.1g} (largest logit {zero['largest_logit']:.3g}); "
        f"of one layer's output {report['farthest_step']:.1g}"
    )
    print(
        f"  importance    largest difference {importance['largest']:.3g}, mean {importance['mean']:.3g}, KL "
        f"{importance['mean_kl']:.3g}; NLL without {importance['nll_plain']:.4f}, with "
        f"{importance['nll_palimpsa']:.4f} nats"
    )
    return 0
