"""`state.json` of a checkpoint: its format and the model it belongs to; nothing here needs torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_palimpsa.config import IMPORTANCE_SYMBOLS, MIXER_SYMBOLS, ConfigError, ModelConfig
from megatron_palimpsa.training import checkpoint_files as files

FORMAT_VERSION = 1


def read_state(path: Path) -> dict[str, Any]:
    """Content of the `state.json` of the checkpoint `path`.

    Raises:
        ConfigError: it was written by another version, or cannot be read.
    """
    try:
        state = json.loads((path / files.STATE).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"checkpoint {path} is damaged: {error}") from None
    if not isinstance(state, dict) or "format_version" not in state:
        raise ConfigError(f"checkpoint {path} is damaged: {files.STATE} does not say its format")
    if state["format_version"] != FORMAT_VERSION:
        raise ConfigError(
            f"{path}: checkpoint format {state['format_version']}, this version reads format {FORMAT_VERSION}"
        )
    return state


def fingerprint(model: ModelConfig) -> dict[str, Any]:
    """The settings that two models must share for one to load the other's weights and compute the same function."""
    settings: dict[str, Any] = {
        "pattern": model.layers,
        "hidden_size": model.hidden_size,
        "padded_vocab_size": model.padded_vocab_size,
        "tie_embeddings": model.tie_embeddings,
        "norm_eps": model.norm_eps,
    }
    symbols = set(model.layers)
    if symbols & (MIXER_SYMBOLS | {"G"}):
        settings |= {name: getattr(model, name) for name in ("d_state", "headdim", "expand", "d_conv")}
    if symbols & {"P", "M"}:
        settings |= {"ngroups": model.ngroups, "norm_groups": model.norm_groups or model.ngroups}
    if symbols & IMPORTANCE_SYMBOLS:
        settings["beta_rank"] = model.beta_rank
    if "*" in model.layers:
        settings["num_attention_heads"] = model.num_attention_heads
        settings["num_query_groups"] = model.num_query_groups or model.num_attention_heads
        if model.rope_theta is not None:
            settings["rope_theta"] = model.rope_theta
    if "-" in model.layers:
        settings["ffn_hidden_size"] = model.ffn_hidden_size
    return settings


def require_same_model(path: Path, model: ModelConfig) -> None:
    """Refuse a checkpoint whose weights are not of this model.

    Raises:
        ConfigError: names the checkpoint and every differing key with both values.
    """
    if differing := differences(read_state(path)["model"], model, "in the checkpoint"):
        raise ConfigError(f"{path}: a checkpoint of another model: {differing}")


def differences(saved: dict[str, Any], model: ModelConfig, place: str) -> str:
    """In which settings `model` differs from the fingerprint `saved`, which was found in `place`; "" where in none."""
    wanted = fingerprint(model)
    return "; ".join(
        f"model.{name} is {saved.get(name)!r} {place} and {wanted.get(name)!r} here"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
    )
