"""Stages of the layout table under DeepSpeed's ZeRO."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helpers.layout_table import Layout, stage
from megatron_palimpsa.config import DeepSpeedConfig, StageConfig, check_stage


def zero_stage(layout: Layout, zero: int, deepspeed: dict[str, Any] | None = None, **overrides: Any) -> StageConfig:
    """`stage` of the layout table under ZeRO stage `zero`; `deepspeed` are further keys of `parallel.deepspeed`."""
    train = {**overrides.pop("train", {})}
    precision = train.pop("precision", "fp32")
    config = stage(layout, train=train, **overrides)
    settings = DeepSpeedConfig(zero_stage=zero, **(deepspeed or {}))
    config = replace(
        config,
        train=replace(config.train, precision=precision),
        parallel=replace(config.parallel, engine="deepspeed", deepspeed=settings),
    )
    check_stage(config, layout.ranks)
    return config
