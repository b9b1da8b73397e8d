"""Whether the package behind an engine is there, known without importing it."""

from __future__ import annotations

from importlib.util import find_spec

from megatron_palimpsa.config import ConfigError, StageConfig


def require_engine(config: StageConfig) -> None:
    """Raises ConfigError where the stage asks for DeepSpeed, which is an extra, and it is not installed."""
    if config.parallel.engine == "deepspeed" and find_spec("deepspeed") is None:
        raise ConfigError(
            "parallel.engine=deepspeed: DeepSpeed is not installed; in this project's folder DS_BUILD_OPS=0 "
            ".venv/bin/pip install -e '.[deepspeed]' -c constraints.txt, or set parallel.engine=megatron"
        )
