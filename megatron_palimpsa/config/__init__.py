"""One YAML file a stage, read strictly into frozen dataclasses.

`load_stage(path, overrides)` follows `base:`, applies dotted overrides (`train.micro_batch_size=2`) and refuses unknown
keys and wrong types; `check_stage` refuses combinations that cannot run. Both raise a `ConfigError` that names the key,
the value and what is allowed, and need neither torch nor a GPU.
"""

from megatron_palimpsa.config.checks import check_ranks, check_stage
from megatron_palimpsa.config.places import writable_place
from megatron_palimpsa.config.reading import (
    apply_overrides,
    load_stage,
    read_as,
    read_tree,
    save_resolved,
    stage_from_dict,
    to_dict,
)
from megatron_palimpsa.config.schema import (
    IMPORTANCE_SYMBOLS,
    LAYER_SYMBOLS,
    MIXER_SYMBOLS,
    CheckpointConfig,
    DataConfig,
    InitFrom,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    StageConfig,
    TrainConfig,
)
from megatron_palimpsa.config.strict_yaml import parse_yaml, write_yaml
from megatron_palimpsa.config.values import ConfigError, parse_count
from megatron_palimpsa.config.zero import DeepSpeedConfig, LossScaleConfig

__all__ = [
    "IMPORTANCE_SYMBOLS",
    "LAYER_SYMBOLS",
    "MIXER_SYMBOLS",
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "DeepSpeedConfig",
    "InitFrom",
    "LoggingConfig",
    "LossScaleConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "StageConfig",
    "TrainConfig",
    "apply_overrides",
    "check_ranks",
    "check_stage",
    "load_stage",
    "parse_count",
    "parse_yaml",
    "read_as",
    "read_tree",
    "save_resolved",
    "stage_from_dict",
    "to_dict",
    "writable_place",
    "write_yaml",
]
