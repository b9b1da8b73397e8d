"""Which engine a stage asks for."""

from __future__ import annotations

from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.engine.base import Engine
from megatron_palimpsa.engine.deepspeed import DeepSpeedEngine
from megatron_palimpsa.engine.installed import require_engine
from megatron_palimpsa.engine.megatron import MegatronEngine


def build_engine(config: StageConfig) -> Engine:
    """The engine that `parallel.engine` names; needs `parallel.initialize` first.

    Raises:
        ConfigError: it is DeepSpeed, which is not installed.
    """
    require_engine(config)
    return DeepSpeedEngine(config) if config.parallel.engine == "deepspeed" else MegatronEngine(config)
