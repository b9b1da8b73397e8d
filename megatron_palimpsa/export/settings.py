"""config.json of an exported model: from the `model:` section of a stage and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from megatron_palimpsa.config import ConfigError, ModelConfig, read_as

MODEL_TYPE = "palimpsa_hybrid"
"""Of `megatron_palimpsa.hf`; not imported from there, which needs transformers."""
Dtype = Literal["bf16", "fp32"]
_DTYPES: Mapping[Dtype, str] = {"bf16": "bfloat16", "fp32": "float32"}

# Ours -> theirs.
_NAMES = {
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
    "vocab_multiple": "pad_vocab_size_multiple",
    "seq_length": "max_position_embeddings",
    "d_state": "state_size",
    "headdim": "mamba_head_dim",
    "expand": "expand",
    "ngroups": "n_groups",
    "d_conv": "conv_kernel",
    "norm_groups": "norm_groups",
    "norm_eps": "layer_norm_epsilon",
    "tie_embeddings": "tie_word_embeddings",
    "fp32_residual": "residual_in_fp32",
    "beta_rank": "beta_rank",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "rope_theta": "rotary_base",
    "ffn_hidden_size": "intermediate_size",
    "init_std": "initializer_range",
}


def to_config(model: ModelConfig, dtype: Dtype, special_ids: Mapping[str, int]) -> dict[str, Any]:
    """The config.json; `special_ids` are `eos_token_id` and `pad_token_id`, where there is a tokenizer."""
    return {
        "architectures": ["PalimpsaHybridForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_palimpsa.PalimpsaHybridConfig",
            "AutoModelForCausalLM": "modeling_palimpsa.PalimpsaHybridForCausalLM",
        },
        "model_type": MODEL_TYPE,
        "dtype": _DTYPES[dtype],
        "pattern": model.layers,
        **{theirs: getattr(model, ours) for ours, theirs in _NAMES.items()},
        **special_ids,
    }


def is_exported(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of an exported model."""
    return config.get("model_type") == MODEL_TYPE


def to_section(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The `model:` section of the model in a config.json.

    Raises:
        ConfigError: it is of another architecture, or lacks a setting.
    """
    if not is_exported(config):
        raise ConfigError(f"{where}: model_type={config.get('model_type')!r} is not {MODEL_TYPE}: no exported model")
    for theirs in ("pattern", *_NAMES.values()):
        if theirs not in config:
            raise ConfigError(f"{where}: {theirs} is missing")
    return {"pattern": config["pattern"]} | {ours: config[theirs] for ours, theirs in _NAMES.items()}


def to_model(config: Mapping[str, Any], where: str) -> ModelConfig:
    """`to_section` with its types checked."""
    return read_as(ModelConfig, to_section(config, where), where)


def dtype_of(config: Mapping[str, Any], where: str) -> Dtype:
    """The dtype of an exported model's weights, but for those that stay fp32.

    Raises:
        ConfigError: it is neither.
    """
    name = config.get("dtype") or config.get("torch_dtype")
    for ours, theirs in _DTYPES.items():
        if name == theirs:
            return ours
    raise ConfigError(f"{where}: dtype={name!r}: only {' and '.join(_DTYPES.values())} are known")
