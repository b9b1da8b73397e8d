"""Geometry of a hybrid of Palimpsa, Mamba2, attention and MLP layers, for transformers."""

from typing import Any

from transformers import PreTrainedConfig

# For the cache: an MLP keeps nothing, but a cache with layers of its kind counts tokens and wants attention for that.
_LAYER_TYPES = {**dict.fromkeys("PMQL-", "linear_attention"), "*": "full_attention"}


class PalimpsaHybridConfig(PreTrainedConfig):
    """Settings of `PalimpsaHybridForCausalLM`.

    Args:
        pattern: one letter a layer: P Palimpsa-M, M Mamba2 (P without importance), Q Palimpsa-D, L the same without
            importance, * attention, - gated MLP.
        vocab_size: ids that the model reads and predicts.
        pad_vocab_size_multiple: the embedding has rows for up to the next multiple; those behind `vocab_size` are kept,
            so that the weights are those that were trained, and have no logits.
        state_size, mamba_head_dim, expand, conv_kernel: of P, M, Q and L layers, as in Mamba2.
        n_groups: groups of heads that share keys and queries in P and M layers; in Q and L layers each has its own.
        norm_groups: groups of the gated RMSNorm of P and M layers; None: `n_groups`.
        beta_rank: rank of beta's projection in P and Q layers.
        num_attention_heads, num_key_value_heads: of attention layers.
        rotary_base: of their rotary position embeddings; None: they have none.
        intermediate_size: of MLP layers.
        max_position_embeddings: tokens of a sequence in training; longer ones are taken as well.

    Raises:
        ValueError: the pattern has another letter, or lacks a setting of a layer that it names.
    """

    model_type = "palimpsa_hybrid"

    pattern: str = "P"
    vocab_size: int = 50277
    pad_vocab_size_multiple: int = 16
    hidden_size: int = 2560
    state_size: int = 128
    mamba_head_dim: int = 64
    expand: int = 2
    n_groups: int = 1
    conv_kernel: int = 4
    norm_groups: int | None = None
    layer_norm_epsilon: float = 1e-5
    residual_in_fp32: bool = True
    beta_rank: int = 128
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    rotary_base: float | None = None
    intermediate_size: int | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if unknown := sorted(set(self.pattern) - set(_LAYER_TYPES)):
            raise ValueError(f"pattern={self.pattern!r}: no layer is called {unknown[0]!r}")
        if "*" in self.pattern and self.num_attention_heads is None:
            raise ValueError(f"pattern={self.pattern!r} has attention layers: num_attention_heads is missing")
        if "-" in self.pattern and self.intermediate_size is None:
            raise ValueError(f"pattern={self.pattern!r} has MLP layers: intermediate_size is missing")
        if "*" in self.pattern and self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**kwargs)

    @property
    def num_hidden_layers(self) -> int:
        return len(self.pattern)

    @property
    def layer_types(self) -> list[str]:
        """What a cache keeps of each layer."""
        return [_LAYER_TYPES[letter] for letter in self.pattern]

    @property
    def number_of_conv_states(self) -> int:
        """Matrix states a layer may keep, in the cache's words: the content and the importance."""
        return 2

    @property
    def inner_size(self) -> int:
        """Channels of a P, M, Q or L layer."""
        return self.expand * self.hidden_size

    @property
    def num_heads(self) -> int:
        """Heads of a P, M, Q or L layer."""
        return self.inner_size // self.mamba_head_dim

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding."""
        return -(-self.vocab_size // self.pad_vocab_size_multiple) * self.pad_vocab_size_multiple
