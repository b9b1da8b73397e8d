"""The table of layouts: its axes, which combinations can run, and the stage that each of them trains."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

from helpers.covering import covering_subset
from helpers.stages import tiny_stage
from megatron_palimpsa.config import ConfigError, StageConfig

MOST_RANKS = 4
STEPS = 6


class Pipeline(NamedTuple):
    pp: int
    vpp: int


class Layout(NamedTuple):
    tp: int = 1
    sequence_parallel: bool = False
    pipeline: Pipeline = Pipeline(1, 1)
    cp: int = 1
    dp: int = 1
    distributed_optimizer: bool = False
    ngroups: int = 1
    tied: bool = True

    @property
    def ranks(self) -> int:
        return self.tp * self.pipeline.pp * self.cp * self.dp

    @property
    def one_process(self) -> Layout:
        """The same model without any parallelism."""
        return Layout(ngroups=self.ngroups, tied=self.tied)

    @property
    def name(self) -> str:
        """For instance `tp2-pp2-vpp2-sp-distopt-g2-untied`; what is off or 1 is left out."""
        sizes = {"tp": self.tp, "pp": self.pipeline.pp, "vpp": self.pipeline.vpp, "cp": self.cp, "dp": self.dp}
        parts = [f"{key}{size}" for key, size in sizes.items() if size > 1]
        parts += ["sp"] * self.sequence_parallel + ["distopt"] * self.distributed_optimizer
        parts += [f"g{self.ngroups}", "tied" if self.tied else "untied"]
        return "-".join(parts)


AXES: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4),
    "sequence_parallel": (False, True),
    "pipeline": (Pipeline(1, 1), Pipeline(2, 1), Pipeline(2, 2)),
    "cp": (1, 2),
    "dp": (1, 2),
    "distributed_optimizer": (False, True),
    "ngroups": (1, 2),
    "tied": (True, False),
}
assert tuple(AXES) == Layout._fields

# One layer of each kind; uneven stages.
_PATTERNS = {1: "PM*-", 2: "P|M*-", 4: "P|M|*|-"}


def stage(layout: Layout, **overrides: Any) -> StageConfig:
    """Four microbatches a step of a model with one layer of each kind; `overrides` as in `tiny_stage`.

    Raises:
        ConfigError: the combination cannot run.
    """
    train = {"global_batch_tokens": 128, "tokens": 12800}
    return tiny_stage(
        layout.ranks,
        model={
            "pattern": _PATTERNS[layout.pipeline.pp * layout.pipeline.vpp],
            "ngroups": layout.ngroups,
            "tie_embeddings": layout.tied,
            "num_attention_heads": 8,
            "num_query_groups": 4,
            # Large enough for gradients through dt that rounding does not reach.
            "dt_min": 0.1,
            "dt_max": 1.0,
            "init_std": 0.2,
            **overrides.pop("model", {}),
        },
        train={**train, **overrides.pop("train", {})},
        # Large weights and a small rate: Adam turns the rounding of a gradient near 0 into a step of the full rate.
        optimizer={"lr": 1e-3, **overrides.pop("optimizer", {})},
        parallel={
            "tp": layout.tp,
            "sequence_parallel": layout.sequence_parallel,
            "pp": layout.pipeline.pp,
            "vpp": layout.pipeline.vpp,
            "cp": layout.cp,
            "distributed_optimizer": layout.distributed_optimizer,
        },
        **overrides,
    )


def combinations() -> list[Layout]:
    """All combinations of the axes on up to MOST_RANKS ranks."""
    layouts = [Layout(*values) for values in product(*AXES.values())]
    return [layout for layout in layouts if layout.ranks <= MOST_RANKS]


def refusal(layout: Layout) -> str | None:
    """Why the configuration check refuses a layout; None for a legal one."""
    try:
        stage(layout)
    except ConfigError as error:
        return str(error)
    return None


LEGAL = [layout for layout in combinations() if refusal(layout) is None]
COVERING = [Layout(*row) for row in covering_subset(LEGAL, cost=lambda row: Layout(*row).ranks)]  # type: ignore[arg-type]
