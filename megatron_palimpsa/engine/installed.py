"""Whether the packages behind an engine and behind layers are there; nothing is imported that is not asked for."""

from __future__ import annotations

from importlib.util import find_spec

from megatron_palimpsa.config import ConfigError, ModelConfig, StageConfig


def require_engine(config: StageConfig) -> None:
    """Raises ConfigError where the stage asks for DeepSpeed, which is an extra, and it is not installed."""
    if config.parallel.engine == "deepspeed" and find_spec("deepspeed") is None:
        raise ConfigError(
            "parallel.engine=deepspeed: DeepSpeed is not installed; in this project's folder DS_BUILD_OPS=0 "
            ".venv/bin/pip install -e '.[deepspeed]' -c constraints.txt, or set parallel.engine=megatron"
        )


def require_layers(model: ModelConfig) -> None:
    """Raises ConfigError where layers of the model need kernels or a GPU that this machine lacks."""
    if "G" not in model.layers:
        return
    import torch

    if find_spec("fla") is None or not torch.cuda.is_available():
        # Where they are there they are imported later: that asks for GPUs, and no rank has chosen its own yet.
        from megatron_palimpsa.model.gated_delta_net import require_kernels

        require_kernels()
