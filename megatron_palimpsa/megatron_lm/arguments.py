"""Palimpsa's settings on Megatron-LM's command line, and which of Megatron's own they do not go with."""

from __future__ import annotations

import argparse

from megatron_palimpsa.config import LAYER_SYMBOLS, ConfigError, ModelConfig
from megatron_palimpsa.model.mixer_parts import MixerOptions

SPEC = ["megatron_palimpsa.megatron_lm.spec", "stack_spec"]


def add_palimpsa_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """For `parse_and_validate_args(extra_args_provider=...)`.

    What Megatron has a flag for keeps it: --mamba-state-dim, --mamba-head-dim, --mamba-num-heads, --mamba-num-groups,
    --norm-epsilon, --init-method-std, --fp32-residual-connection, --untie-embeddings-and-output-weights.
    """
    group = parser.add_argument_group(
        "palimpsa", "of P (Palimpsa-M), M (Mamba2), Q (Palimpsa-D) and L layers under --spec " + " ".join(SPEC)
    )
    default = ModelConfig(pattern="P", hidden_size=1, vocab_size=1, seq_length=1)
    group.add_argument(
        "--palimpsa-beta-rank",
        type=int,
        default=default.beta_rank,
        help="rank of beta's projection in P and Q layers (default: %(default)s)",
    )
    group.add_argument(
        "--palimpsa-beta-scale-init",
        choices=["scratch", "finetune", "finetune-effective"],
        default=default.beta_scale_init,
        help="b_scale, raw under a softplus: scratch 1, finetune U(0.1, 1), finetune-effective softplus in U(0.1, 1) "
        "(default: %(default)s)",
    )
    group.add_argument("--palimpsa-train-prior", action="store_true", help="train the prior's importance")
    group.add_argument(
        "--palimpsa-norm-groups",
        type=int,
        default=None,
        help="groups of the gated norm over all channels (default: --mamba-num-groups)",
    )
    group.add_argument(
        "--palimpsa-d-conv", type=int, default=default.d_conv, help="width of the convolution (default: %(default)s)"
    )
    group.add_argument(
        "--palimpsa-dt-min", type=float, default=default.dt_min, help="smallest initial step (default: %(default)s)"
    )
    group.add_argument(
        "--palimpsa-dt-max", type=float, default=default.dt_max, help="largest initial step (default: %(default)s)"
    )
    return parser


def mixer_options(args: argparse.Namespace) -> MixerOptions:
    """What the mixers need beyond Megatron's TransformerConfig."""
    return MixerOptions(
        d_conv=args.palimpsa_d_conv,
        norm_groups=args.palimpsa_norm_groups,
        beta_rank=args.palimpsa_beta_rank,
        train_prior=args.palimpsa_train_prior,
    )


def model_config(args: argparse.Namespace) -> ModelConfig:
    """The same model in this package's terms, for initial weights and FLOPs; `args` are checked.

    Raises:
        ConfigError: a number is out of range.
    """
    try:
        return ModelConfig(
            pattern=args.hybrid_layer_pattern,
            hidden_size=args.hidden_size,
            vocab_size=args.padded_vocab_size,
            vocab_multiple=1,
            seq_length=args.seq_length,
            d_state=args.mamba_state_dim,
            headdim=args.mamba_head_dim,
            expand=args.mamba_num_heads * args.mamba_head_dim // args.hidden_size,
            ngroups=args.mamba_num_groups,
            d_conv=args.palimpsa_d_conv,
            norm_groups=args.palimpsa_norm_groups,
            norm_eps=args.layernorm_epsilon,
            tie_embeddings=not args.untie_embeddings_and_output_weights,
            fp32_residual=args.fp32_residual_connection,
            beta_rank=args.palimpsa_beta_rank,
            beta_scale_init=args.palimpsa_beta_scale_init,
            train_prior=args.palimpsa_train_prior,
            dt_min=args.palimpsa_dt_min,
            dt_max=args.palimpsa_dt_max,
            init_std=args.init_method_std,
            num_attention_heads=args.num_attention_heads,
            num_query_groups=args.num_query_groups if args.group_query_attention else None,
            ffn_hidden_size=args.ffn_hidden_size,
        )
    except ValueError as error:
        raise ConfigError(f"--palimpsa-* or a setting of the model: {error}") from None


def check_args(args: argparse.Namespace) -> None:
    """Refuse what the layers cannot do or would do wrongly under Megatron's loop.

    Args:
        args: validated by Megatron.

    Raises:
        ConfigError: names the flag and what to do.
    """
    if not hasattr(args, "palimpsa_beta_rank"):
        raise ConfigError("the --palimpsa-* flags are missing: pass extra_args_provider=add_palimpsa_args to Megatron")
    pattern = args.hybrid_layer_pattern
    if not pattern:
        raise ConfigError("--hybrid-layer-pattern is missing: one letter a layer, P for Palimpsa-M")
    symbols = {symbol: meaning for symbol, meaning in LAYER_SYMBOLS.items() if symbol != "G"}
    unknown = sorted(set(pattern) - set(symbols) - {"|"})
    if unknown:
        allowed = ", ".join(f"{symbol} ({meaning})" for symbol, meaning in symbols.items())
        raise ConfigError(f"--hybrid-layer-pattern {pattern}: {unknown[0]!r} has no layer here; there are {allowed}")
    if args.spec != SPEC:
        raise ConfigError(
            f"--spec {' '.join(args.spec or ['(none)'])} builds no P layers: give --spec {' '.join(SPEC)}"
        )
    _check_flags(args)
    _check_geometry(args)


def _check_flags(args: argparse.Namespace) -> None:
    for wrong, advice in (
        (args.transformer_impl != "local", "give --transformer-impl local: no layer is Transformer Engine's"),
        (
            args.gradient_accumulation_fusion,
            "give --no-gradient-accumulation-fusion: it needs Apex or Transformer Engine",
        ),
        (args.normalization != "RMSNorm", f"give --normalization RMSNorm, not {args.normalization}"),
        (args.add_bias_linear, "give --disable-bias-linear: the linear layers have no bias"),
        (
            args.position_embedding_type != "none",
            f"give --position-embedding-type none, not {args.position_embedding_type}",
        ),
        (args.fp16, "drop --fp16: train in bf16 or fp32"),
        (args.context_parallel_size > 1, "drop --context-parallel-size: Megatron deals a sequence out in zigzag"),
        (
            args.use_megatron_fsdp or args.use_torch_fsdp2,
            "drop --use-megatron-fsdp and --use-torch-fsdp2: --use-distributed-optimizer is what works",
        ),
        (
            args.init_model_with_meta_device,
            "drop --init-model-with-meta-device: weights are drawn when layers are built",
        ),
        (args.use_cpu_initialization, "drop --use-cpu-initialization: Megatron would leave the model on the CPU"),
        (
            "*" in args.hybrid_layer_pattern and args.attention_dropout > 0,
            f"give --attention-dropout 0, not {args.attention_dropout}",
        ),
        (
            "-" in args.hybrid_layer_pattern and not args.swiglu,
            "give --swiglu: MLP layers are gated, and their checkpoints otherwise fit no stage",
        ),
    ):
        if wrong:
            raise ConfigError(advice)


def _check_geometry(args: argparse.Namespace) -> None:
    heads, headdim, hidden = args.mamba_num_heads, args.mamba_head_dim, args.hidden_size
    if heads is None:
        raise ConfigError(f"--mamba-num-heads is missing: {2 * hidden // headdim} for the usual expansion of 2")
    if heads * headdim % hidden:
        raise ConfigError(
            f"--mamba-num-heads {heads} * --mamba-head-dim {headdim} is not a multiple of --hidden-size {hidden}"
        )
    tp, groups, norm_groups = args.tensor_model_parallel_size, args.mamba_num_groups, args.palimpsa_norm_groups
    for flag, value, of, whole in (
        ("--tensor-model-parallel-size", tp, "--mamba-num-heads", heads),
        ("--mamba-num-groups", groups, "--mamba-num-heads", heads),
        ("--palimpsa-norm-groups", norm_groups or groups, "the channels of a layer", heads * headdim),
    ):
        if value < 1 or whole % value:
            raise ConfigError(f"{flag} {value} does not divide {of}, which is {whole}")
