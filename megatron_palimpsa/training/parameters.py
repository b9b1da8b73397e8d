"""How many parameters a model has, and how many of them a rank holds."""

from __future__ import annotations

from megatron_palimpsa.config import IMPORTANCE_SYMBOLS, ModelConfig, StageConfig


def layer_parameters(model: ModelConfig, symbol: str, tp: int = 1) -> int:
    """Parameters of one layer with its norm that a tensor-parallel rank holds; `symbol` is a letter of the pattern."""
    hidden, inner, heads = model.hidden_size, model.d_inner // tp, model.nheads // tp
    if symbol == "*":
        attention_heads = model.num_attention_heads or 1
        groups = model.num_query_groups or attention_heads
        return hidden + (2 * hidden * hidden + 2 * hidden * groups * (hidden // attention_heads)) // tp
    if symbol == "-":
        return hidden + 3 * hidden * (model.ffn_hidden_size or 0) // tp
    if symbol == "G":
        return _gated_delta_net(model)
    plain = _palimpsa_d(model, heads) if symbol in "QL" else _mamba2(model, heads, tp)
    if symbol not in IMPORTANCE_SYMBOLS:
        return plain
    return plain + model.beta_rank * (hidden + inner) + 2 * heads


def _mamba2(model: ModelConfig, heads: int, tp: int) -> int:
    hidden, inner = model.hidden_size, heads * model.headdim
    # B and C are split by group where that is possible and held whole where it is not.
    shared = 2 * model.ngroups * model.d_state // (tp if model.ngroups % tp == 0 else 1)
    convolved = inner + shared
    projections = hidden * (inner + convolved + heads) + inner * hidden
    return hidden + projections + convolved * (model.d_conv + 1) + 3 * heads + inner


def _gated_delta_net(model: ModelConfig) -> int:
    """Palimpsa-D's without D, with keys and queries as there."""
    return _palimpsa_d(model, model.nheads) - model.nheads


def _palimpsa_d(model: ModelConfig, heads: int) -> int:
    hidden, inner = model.hidden_size, heads * model.headdim
    convolved = inner + 2 * heads * model.d_state
    projections = hidden * (inner + convolved + 2 * heads) + inner * hidden
    return hidden + projections + convolved * model.d_conv + 3 * heads + model.headdim


def count_parameters(model: ModelConfig) -> int:
    """Parameters of the whole model, as the built one has them."""
    embeddings = model.padded_vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    return embeddings + model.hidden_size + sum(layer_parameters(model, symbol) for symbol in model.layers)


def layers_of_rank(config: StageConfig, pipeline_rank: int) -> list[str]:
    """The layers of each of a pipeline rank's chunks."""
    pp, vpp = config.parallel.pp, config.parallel.vpp
    return config.model.stages(pp * vpp)[pipeline_rank::pp]


def rank_parameters(config: StageConfig, pipeline_rank: int) -> int:
    """Parameters that a rank of this pipeline stage holds, tied embeddings on the first and the last one."""
    model, parallel = config.model, config.parallel
    count = sum(
        layer_parameters(model, symbol, parallel.tp) for symbol in "".join(layers_of_rank(config, pipeline_rank))
    )
    embedding = model.padded_vocab_size * model.hidden_size // parallel.tp
    is_first, is_last = pipeline_rank == 0, pipeline_rank == parallel.pp - 1
    embeddings = int(is_first) + int(is_last and (not is_first or not model.tie_embeddings))
    return count + embeddings * embedding + (model.hidden_size if is_last else 0)
