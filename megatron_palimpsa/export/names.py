"""Names of an exported model's weights and ours, one line a kind of tensor; mixers keep to Hugging Face Mamba2's."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_palimpsa.config import LAYER_SYMBOLS, ConfigError, ModelConfig
from megatron_palimpsa.model import mamba2_names
from megatron_palimpsa.model.mamba2_names import PER_LAYER, PER_MODEL, Tensors, mixer_lines
from megatron_palimpsa.model.naming import OUTPUT

_OURS, _THEIRS = "decoder.layers.{layer}.", "backbone.layers.{layer}."
_PER_LAYER_D = mixer_lines("g+v+k+q+s+dt", "v+k+q", ("weight",), norm="head")
_IMPORTANCE = (
    Tensors(f"{_OURS}mixer.beta_down_weight", f"{_THEIRS}mixer.beta_down.weight", ("rank", "hidden")),
    Tensors(f"{_OURS}mixer.beta_up_weight", f"{_THEIRS}mixer.beta_up.weight", ("x", "rank")),
    Tensors(f"{_OURS}mixer.b_scale", f"{_THEIRS}mixer.b_scale", ("dt",)),
    Tensors(f"{_OURS}mixer.prior_log", f"{_THEIRS}mixer.prior_log", ("dt",)),
)
_ATTENTION = (
    Tensors(f"{_OURS}input_layernorm.weight", f"{_THEIRS}norm.weight", ("hidden",)),
    Tensors(f"{_OURS}self_attention.linear_qkv.weight", f"{_THEIRS}mixer.qkv_proj.weight", ("qkv", "hidden")),
    Tensors(f"{_OURS}self_attention.linear_proj.weight", f"{_THEIRS}mixer.o_proj.weight", ("hidden", "hidden")),
)
_MLP = (
    Tensors(f"{_OURS}pre_mlp_layernorm.weight", f"{_THEIRS}norm.weight", ("hidden",)),
    Tensors(f"{_OURS}mlp.linear_fc1.weight", f"{_THEIRS}mixer.gate_up_proj.weight", ("gate_up", "hidden")),
    Tensors(f"{_OURS}mlp.linear_fc2.weight", f"{_THEIRS}mixer.down_proj.weight", ("hidden", "ffn")),
)
_OF_LETTER: Mapping[str, tuple[Tensors, ...]] = {
    "P": (*PER_LAYER, *_IMPORTANCE),
    "M": PER_LAYER,
    "Q": (*_PER_LAYER_D, *_IMPORTANCE),
    "L": _PER_LAYER_D,
    "*": _ATTENTION,
    "-": _MLP,
}


def require_exportable(model: ModelConfig, where: str) -> None:
    """Raises ConfigError naming a layer of the pattern that has no counterpart in the exported model."""
    for letter in sorted(set(model.layers) - set(_OF_LETTER)):
        raise ConfigError(
            f"{where}: model.pattern={model.pattern!r}: layers of the kind {letter} "
            f"({LAYER_SYMBOLS.get(letter, 'unknown')}) cannot be exported; {', '.join(_OF_LETTER)} can"
        )


def sizes(model: ModelConfig) -> dict[str, int]:
    """What the names in the table's shapes stand for."""
    heads = model.num_attention_heads or 1
    key_heads = model.num_query_groups or heads
    ffn = model.ffn_hidden_size or 0
    keys = model.nheads * model.d_state
    of_d = {"g": model.d_inner, "v": model.d_inner, "k": keys, "q": keys, "s": model.nheads, "head": model.headdim}
    others = {
        "rank": model.beta_rank,
        "qkv": (heads + 2 * key_heads) * (model.hidden_size // heads),
        "gate_up": 2 * ffn,
        "ffn": ffn,
    }
    return mamba2_names.sizes(model) | of_d | others


def lines(model: ModelConfig) -> list[Tensors]:
    """The table written out for a model, theirs in the order of the layers; no output layer where it is tied."""
    embedding, final_norm, output = PER_MODEL
    table = [embedding]
    for layer, letter in enumerate(model.layers):
        for line in _OF_LETTER[letter]:
            table.append(Tensors(line.ours.format(layer=layer), line.theirs.format(layer=layer), line.shape, line.part))
    table.append(final_norm)
    assert output.ours == OUTPUT
    return table if model.tie_embeddings else [*table, output]
