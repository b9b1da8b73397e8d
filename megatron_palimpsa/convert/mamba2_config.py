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

# Theirs -> ours. Hugging Face's files name all of them.
_HUGGING_FACE = {
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
    "state_size": "d_state",
    "head_dim": "headdim",
    "expand": "expand",
    "n_groups": "ngroups",
    "conv_kernel": "d_conv",
    "layer_norm_epsilon": "norm_eps",
    "residual_in_fp32": "fp32_residual",
}
_HUGGING_FACE_ONLY = {
    "use_bias": False,
    "use_conv_bias": True,
    "rms_norm": True,
    "hidden_act": "silu",
    "time_step_limit": _NO_LIMIT,
}
# state-spaces' files leave out what is mamba_ssm's default.
_STATE_SPACES = {"d_model": "hidden_size", "vocab_size": "vocab_size"}
_STATE_SPACES_DEFAULTS = {"residual_in_fp32": ("fp32_residual", True), "tie_embeddings": ("tie_embeddings", True)}
_STATE_SPACES_ONLY = {"d_intermediate": 0, "attn_layer_idx": [], "rms_norm": True}
_SSM_DEFAULTS = {
    "d_state": ("d_state", 128),
    "headdim": ("headdim", 64),
    "expand": ("expand", 2),
    "ngroups": ("ngroups", 1),
    "d_conv": ("d_conv", 4),
}
_SSM_ONLY = {
    "d_ssm": None,
    "D_has_hdim": False,
    "rmsnorm": True,
    "norm_before_gate": False,
    "dt_limit": _NO_LIMIT,
    "bias": False,
    "conv_bias": True,
    "activation": "swish",
}
_SSM_OF_NO_EFFECT = {"layer", "chunk_size", "use_mem_eff_path"} | {
    "A_init_range",
    "dt_min",
    "dt_max",
    "dt_init_floor",
    "conv_init",
}


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
    if "model_type" in config:
        return _hugging_face(config, where)
    return _state_spaces(config, where)


def _hugging_face(config: Mapping[str, Any], where: str) -> Geometry:
    if config["model_type"] != "mamba2":
        raise ConfigError(f"{where}: model_type={config['model_type']!r} is not mamba2")
    _require_only(config, _HUGGING_FACE_ONLY, where)
    depth, heads = (_whole(config, name, where) for name in ("num_hidden_layers", "num_heads"))
    section = {ours: _present(config, theirs, where) for theirs, ours in _HUGGING_FACE.items()}
    section["tie_embeddings"] = config.get("tie_word_embeddings", False)
    inner, head_dim = (_whole(config, name, where) for name in ("expand", "head_dim"))
    inner *= _whole(config, "hidden_size", where)
    if heads * head_dim != inner:
        raise ConfigError(f"{where}: num_heads={heads} * head_dim={head_dim} is not expand * hidden_size, {inner}")
    rows = _whole(config, "vocab_size", where)
    return Geometry(_section(depth, section, _VOCAB_MULTIPLE), rows)


def _state_spaces(config: Mapping[str, Any], where: str) -> Geometry:
    ssm = config.get("ssm_cfg")
    if not isinstance(ssm, dict) or ssm.get("layer") != "Mamba2":
        raise ConfigError(
            f"{where}: neither of Hugging Face's Mamba2 (model_type mamba2) nor of state-spaces' (ssm_cfg.layer Mamba2)"
        )
    _require_only(config, _STATE_SPACES_ONLY, where)
    _require_only(ssm, _SSM_ONLY, f"{where}: ssm_cfg")
    if unknown := sorted(ssm.keys() - _SSM_ONLY.keys() - _SSM_DEFAULTS.keys() - _SSM_OF_NO_EFFECT):
        raise ConfigError(f"{where}: ssm_cfg.{unknown[0]}={ssm[unknown[0]]!r}: what it does is not known here")
    section = {ours: _present(config, theirs, where) for theirs, ours in _STATE_SPACES.items()}
    section |= {ours: config.get(theirs, default) for theirs, (ours, default) in _STATE_SPACES_DEFAULTS.items()}
    section |= {ours: ssm.get(theirs, default) for theirs, (ours, default) in _SSM_DEFAULTS.items()}
    multiple = _whole({"pad_vocab_size_multiple": 8} | dict(config), "pad_vocab_size_multiple", where)
    rows = -(-_whole(config, "vocab_size", where) // multiple) * multiple
    # mamba_ssm's own: no setting changes it.
    section["norm_eps"] = 1e-5
    return Geometry(_section(_whole(config, "n_layer", where), section, math.lcm(multiple, _VOCAB_MULTIPLE)), rows)


def _section(depth: int, settings: dict[str, Any], vocab_multiple: int) -> dict[str, Any]:
    return {"pattern": "M" * min(depth, _LARGEST_DEPTH)} | settings | {"vocab_multiple": vocab_multiple}


def _require_only(settings: Mapping[str, Any], only: Mapping[str, Any], where: str) -> None:
    for name, value in only.items():
        if settings.get(name, value) != value:
            raise ConfigError(f"{where}: {name}={settings[name]!r}: only {value!r} can be converted")


def _present(config: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in config:
        raise ConfigError(f"{where}: {name} is missing")
    return config[name]


def _whole(config: Mapping[str, Any], name: str, where: str) -> int:
    value = _present(config, name, where)
    if type(value) is not int or value <= 0:
        raise ConfigError(f"{where}: {name}={value!r}: a positive whole number is needed")
    return value
