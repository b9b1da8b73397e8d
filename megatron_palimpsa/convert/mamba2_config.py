"""The geometry of a published Mamba2 model: from its config.json to the `model:` section of a stage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_palimpsa.config import ConfigError

_VOCAB_MULTIPLE = 16
_LARGEST_DEPTH = 10_000
_NO_LIMIT = [0.0, math.inf]
_NEEDED = object()

# Theirs -> ours, and what the source implementation takes where the file leaves it out.
_HUGGING_FACE = {
    "hidden_size": ("hidden_size", _NEEDED),
    "vocab_size": ("vocab_size", _NEEDED),
    "state_size": ("d_state", _NEEDED),
    "head_dim": ("headdim", _NEEDED),
    "expand": ("expand", _NEEDED),
    "n_groups": ("ngroups", _NEEDED),
    "conv_kernel": ("d_conv", _NEEDED),
    "layer_norm_epsilon": ("norm_eps", _NEEDED),
    "residual_in_fp32": ("fp32_residual", _NEEDED),
    "tie_word_embeddings": ("tie_embeddings", False),
}
_STATE_SPACES = {
    "d_model": ("hidden_size", _NEEDED),
    "vocab_size": ("vocab_size", _NEEDED),
    "residual_in_fp32": ("fp32_residual", True),
    "tie_embeddings": ("tie_embeddings", True),
}
_SSM = {
    "d_state": ("d_state", 128),
    "headdim": ("headdim", 64),
    "expand": ("expand", 2),
    "ngroups": ("ngroups", 1),
    "d_conv": ("d_conv", 4),
}
# What our layers compute; a file that says something else is refused.
_HUGGING_FACE_ONLY = {
    "use_bias": False,
    "use_conv_bias": True,
    "rms_norm": True,
    "hidden_act": "silu",
    "time_step_limit": _NO_LIMIT,
}
_STATE_SPACES_ONLY = {"d_intermediate": 0, "attn_layer_idx": [], "rms_norm": True}
_SSM_ONLY = {
    "layer": "Mamba2",
    "d_ssm": None,
    "D_has_hdim": False,
    "rmsnorm": True,
    "norm_before_gate": False,
    "dt_limit": _NO_LIMIT,
    "bias": False,
    "conv_bias": True,
    "activation": "swish",
}
_SSM_OF_NO_EFFECT = {"A_init_range", "dt_min", "dt_max", "dt_init_floor", "conv_init", "chunk_size", "use_mem_eff_path"}


@dataclass(frozen=True)
class Geometry:
    """What a config.json says."""

    section: dict[str, Any]
    """The `model:` section but for `seq_length`, values as they were found there."""
    vocabulary_rows: int
    """Rows of their embedding, padding included."""


def read_geometry(config: Mapping[str, Any], where: str) -> Geometry:
    """The geometry in a config.json of state-spaces or Hugging Face.

    Raises:
        ConfigError: it is of another architecture, lacks a setting or has one that our Mamba2 layers have not.
    """
    ssm = config.get("ssm_cfg")
    if config.get("model_type") == "mamba2":
        section = _section(config, _HUGGING_FACE, _HUGGING_FACE_ONLY, where)
        depth, multiple = "num_hidden_layers", 1
        names = ("num_heads", "head_dim", "expand", "hidden_size")
        heads, head_dim, expand, hidden = (_whole(config, name, where) for name in names)
        if heads * head_dim != expand * hidden:
            raise ConfigError(f"{where}: num_heads={heads} * head_dim={head_dim} is not expand * hidden_size")
    elif isinstance(ssm, dict) and ssm.get("layer") == "Mamba2":
        if unknown := sorted(ssm.keys() - _SSM_ONLY.keys() - _SSM.keys() - _SSM_OF_NO_EFFECT):
            raise ConfigError(f"{where}: ssm_cfg.{unknown[0]}={ssm[unknown[0]]!r}: what it does is not known here")
        section = _section(config, _STATE_SPACES, _STATE_SPACES_ONLY, where)
        section |= _section(ssm, _SSM, _SSM_ONLY, f"{where}: ssm_cfg")
        section["norm_eps"] = 1e-5  # mamba_ssm's, which no setting of a file changes
        depth = "n_layer"
        multiple = _whole({"pad_vocab_size_multiple": 8} | dict(config), "pad_vocab_size_multiple", where)
    else:
        raise ConfigError(
            f"{where}: neither of Hugging Face's Mamba2 (model_type mamba2) nor of state-spaces' (ssm_cfg.layer Mamba2)"
        )
    layers, vocabulary = (_whole(config, name, where) for name in (depth, "vocab_size"))
    section["pattern"] = "M" * min(layers, _LARGEST_DEPTH)
    section["vocab_multiple"] = math.lcm(multiple, _VOCAB_MULTIPLE)
    return Geometry(section, -(-vocabulary // multiple) * multiple)


def _section(
    settings: Mapping[str, Any], table: Mapping[str, tuple[str, Any]], only: Mapping[str, Any], where: str
) -> dict[str, Any]:
    for name, value in only.items():
        if settings.get(name, value) != value:
            raise ConfigError(f"{where}: {name}={settings[name]!r}: only {value!r} can be converted")
    for name, (_, default) in table.items():
        if default is _NEEDED and name not in settings:
            raise ConfigError(f"{where}: {name} is missing")
    return {ours: settings.get(theirs, default) for theirs, (ours, default) in table.items()}


def _whole(config: Mapping[str, Any], name: str, where: str) -> int:
    value = config.get(name)
    if type(value) is not int or value <= 0:
        raise ConfigError(f"{where}: {name}={value!r}: a positive whole number is needed")
    return value
