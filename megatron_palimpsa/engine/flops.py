"""Floating-point operations of the whole model, for MFU.

Counted are the operations of the mathematics (a multiply-add is two), not those of an implementation: chunked scans
and recomputation do more. Norms, activations and the softmax are left out. Forward, a token and layer, with h channels
of the residual stream, d of the mixer in H heads, G groups of keys, K state channels and W taps:

    M   2 h (2 d + 2 G K + H) + 2 d h + 2 W (d + 2 G K) + 5 d K     the recurrence of arXiv 2405.21060
    L   2 h (2 d + 2 H K + 2 H) + 2 d h + 2 W (d + 2 H K) + 5 d K   each head has keys and queries, arXiv 2602.09075
    G   L's + 2 d K                                                 what a key reads is taken back, arXiv 2412.06464
    P   M's, Q is L's, + 2 r (h + d) + 5 d K                        rank r of beta, the second state
    *   2 h (2 h + 2 h Q / A) + 4 h (T + 1) / 2                     A query heads in Q groups over T tokens
    -   6 h f                                                       gated, f wide

Megatron-LM counts 7 d K for Mamba2's scan and no convolution. Nothing here depends on the layout.
"""

from __future__ import annotations

from megatron_palimpsa.config import ModelConfig


def forward_flops_per_token(model: ModelConfig) -> float:
    """Forward pass of the whole model, averaged over a full sequence of `seq_length` tokens."""
    layers = {
        "M": _mamba2(model),
        "P": _mamba2(model) + importance_flops_per_token(model),
        "L": _palimpsa_d(model),
        "Q": _palimpsa_d(model) + importance_flops_per_token(model),
        "G": _palimpsa_d(model) + 2 * model.d_inner * model.d_state,
        "*": _attention(model),
        "-": _mlp(model),
    }
    head = 2 * model.hidden_size * model.padded_vocab_size
    return sum(layers[symbol] for symbol in model.layers) + head


def train_flops_per_token(model: ModelConfig) -> float:
    """Forward and backward; the backward of a product is two products."""
    return 3 * forward_flops_per_token(model)


def _mamba2(model: ModelConfig) -> float:
    return _mixer(model, groups=model.ngroups, per_head=1)


def _palimpsa_d(model: ModelConfig) -> float:
    return _mixer(model, groups=model.nheads, per_head=2)


def _mixer(model: ModelConfig, groups: int, per_head: int) -> float:
    """With keys and queries of `groups` and as many projections as `per_head` onto one number a head."""
    hidden, inner = model.hidden_size, model.d_inner
    convolved = inner + 2 * groups * model.d_state
    projections = 2 * hidden * (inner + convolved + per_head * model.nheads) + 2 * inner * hidden
    # A state element is decayed and gets an outer product (3), and its product with q is summed (2).
    scan = 5 * inner * model.d_state
    return projections + 2 * model.d_conv * convolved + scan


def importance_flops_per_token(model: ModelConfig) -> float:
    """What the forward pass of a `P` layer does beyond that of an `M` layer, or `Q` beyond `L`."""
    projections = 2 * model.beta_rank * (model.hidden_size + model.d_inner)
    # The second state's update (3), the prior added to it and the division (2).
    return projections + 5 * model.d_inner * model.d_state


def _attention(model: ModelConfig) -> float:
    if "*" not in model.layers:
        return 0
    hidden, heads = model.hidden_size, model.num_attention_heads or 1
    groups = model.num_query_groups or heads
    projections = 2 * hidden * (2 * hidden + 2 * hidden * groups // heads)
    # Scores and values over the (T + 1) / 2 tokens that a query sees on average without document borders.
    return projections + 2 * 2 * hidden * (model.seq_length + 1) / 2


def _mlp(model: ModelConfig) -> float:
    # Gate, up and down projection.
    return 3 * 2 * model.hidden_size * (model.ffn_hidden_size or 0)
