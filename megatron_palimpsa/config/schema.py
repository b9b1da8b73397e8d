"""The settings of a stage, as frozen dataclasses; a wrong type, an unknown key or a number out of range is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from megatron_palimpsa.config.values import (
    STRICT,
    Count,
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
)
from megatron_palimpsa.config.zero import DeepSpeedConfig

LAYER_SYMBOLS = {
    "P": "Palimpsa-M",
    "M": "Mamba2",
    "Q": "Palimpsa-D",
    "L": "Palimpsa-D without importance",
    "G": "Gated DeltaNet",
    "*": "attention",
    "-": "MLP",
}
MIXER_SYMBOLS = frozenset("PMQL")
"""Layers with a matrix state."""
IMPORTANCE_SYMBOLS = frozenset("PQ")
"""Those among them that have a second one, the importance; M is P and L is Q without it."""


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """Geometry and initialisation.

    The names follow Mamba2's: `d_state` is K, `headdim` is V of palimpsa_kernels, and there are expand * hidden_size /
    headdim heads. In Q, L and G layers each has K channels of queries and of keys; elsewhere V / K is called expand_v.
    """

    pattern: Annotated[str, Field(min_length=1)]
    """One letter a layer: P Palimpsa-M, M Mamba2, Q Palimpsa-D, L the same without importance, G Gated DeltaNet,
    * attention, - MLP; `|` marks the borders of the pp * vpp stages."""
    hidden_size: Positive
    vocab_size: Count
    """Ids the tokenizer may give; the embedding is padded up to a multiple of `vocab_multiple`."""
    seq_length: Count
    """Tokens in one packed sequence."""
    d_state: Positive = 128
    headdim: Positive = 64
    expand: Positive = 2
    ngroups: Positive = 1
    """Groups of heads that share keys and queries, of P and M layers; in Q, L and G layers each head has its own."""
    d_conv: Annotated[int, Field(ge=2)] = 4
    norm_groups: Positive | None = None
    """Groups of the gated RMSNorm of P and M layers; None follows `ngroups` (state-spaces, Hugging Face, Megatron)."""
    norm_eps: PositiveFloat = 1e-5
    """Of all norms, those inside of the layers too (1e-5 in the authors' models of P layers, 1e-6 in those of Q)."""
    vocab_multiple: Positive = 16
    tie_embeddings: bool = True
    fp32_residual: bool = True
    beta_rank: Positive = 128
    """Rank of beta's projection in P and Q layers (48 for 170M, 96 for 760M; the authors' layer default is 128)."""
    beta_scale_init: Literal["scratch", "finetune", "finetune-effective"] = "scratch"
    """b_scale, raw under a softplus: `scratch` 1, `finetune` U(0.1, 1), `finetune-effective` softplus in U(0.1, 1)."""
    train_prior: bool = False
    dt_min: PositiveFloat = 1e-3
    dt_max: PositiveFloat = 1e-1
    a_min: PositiveFloat = 1.0
    """Initial rates A of the decay exp(-dt * A) are uniform from here to `a_max`."""
    a_max: PositiveFloat = 16.0
    init_std: PositiveFloat = 0.02
    num_attention_heads: Positive | None = None
    num_query_groups: Positive | None = None
    rope_theta: PositiveFloat | None = None
    """Base of rotary position embeddings in attention layers, 10000 in most Transformers; None: none, where layers with
    a state know the order."""
    ffn_hidden_size: Positive | None = None

    @property
    def d_inner(self) -> int:
        return self.expand * self.hidden_size

    @property
    def nheads(self) -> int:
        return self.d_inner // self.headdim

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def layers(self) -> str:
        """The pattern without pipeline borders."""
        return self.pattern.replace("|", "")

    def stages(self, count: int) -> list[str]:
        """The layers of each of `count` (pp * vpp) pipeline stages in model order, as marked by `|` or split evenly.

        Chunk c of pipeline rank r is stage c * pp + r.
        """
        if count == 1:
            return [self.layers]
        if "|" in self.pattern:
            return self.pattern.split("|")
        size = len(self.layers) // count
        return [self.layers[start : start + size] for start in range(0, len(self.layers), size)]


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """Blend files (YAML lists of {set, weight, epochs}) of prepared sets; paths are relative to the working folder."""

    train_blend: str
    valid_blend: str
    tokenizer: str
    """File that the shards were made with: a tokenizer.json or a SentencePiece `.model`."""
    packing: Literal["concat", "best-fit"] = "concat"
    """`concat` cuts one stream of documents every seq_length tokens; `best-fit` keeps them whole where they fit."""


@dataclass(frozen=True, config=STRICT)
class TrainConfig:
    """How long, how much at once and in which precision."""

    tokens: Count
    """Tokens of the stage; it ends with the first step that reaches them."""
    global_batch_tokens: Count
    micro_batch_size: Positive = 1
    """Packed sequences a rank takes through the model at once."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """`fp16` scales the loss (`parallel.deepspeed.fp16`) and runs under the DeepSpeed engine only."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What the backward pass forms again instead of keeping it: `selective` what costs memory and little time
    (convolutions, norms, beta's logits, the vocabulary's logits), `full` all of every layer."""
    eval_interval: Positive = 100
    eval_batches: Positive = 8
    stop_at_step: Positive | None = None
    stop_at_tokens: Count | None = None
    stop_after_minutes: PositiveFloat | None = None
    max_grad_norm_ratio: PositiveFloat | None = 100.0
    """A step whose gradient norm exceeds this multiple of the running median is skipped and counted; None: no bound."""
    max_loss_rise: PositiveFloat | None = 5.0
    """So is one whose loss lies more nats above the running median; None: no bound."""
    max_bad_steps: Positive = 10
    """Skipped steps in a row after which the run stops (exit code 3)."""
    watchdog_seconds: PositiveFloat | None = 900.0
    """Of several ranks, each that gets no step, validation or save done for so long writes its Python stacks to its log
    and ends. Below the 20 minutes after which collectives fail, above the longest of the three, the first step with its
    compilation of kernels among them. None: no watchdog."""


@dataclass(frozen=True, config=STRICT)
class OptimizerConfig:
    """AdamW and its schedule; the learning rate starts anew in every stage."""

    lr: PositiveFloat
    min_lr: NonNegativeFloat = 0.0
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: NonNegative = 200
    weight_decay: NonNegativeFloat = 0.1
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: PositiveFloat = 1e-8
    clip_grad: PositiveFloat = 1.0


@dataclass(frozen=True, config=STRICT)
class ParallelConfig:
    """Layout; data parallelism is what the world size leaves over."""

    engine: Literal["megatron", "deepspeed"] = "megatron"
    tp: Positive = 1
    pp: Positive = 1
    vpp: Positive = 1
    """Model chunks a pipeline rank holds; above 1 the 1F1B schedule is interleaved and needs pp > 1."""
    cp: Positive = 1
    """Context-parallel ranks; each takes micro_batch_size * seq_length / cp successive tokens of a packed row."""
    sequence_parallel: bool = False
    distributed_optimizer: bool = True
    """Of the Megatron engine."""
    deepspeed: DeepSpeedConfig = dataclasses.field(default_factory=DeepSpeedConfig)
    """Of the DeepSpeed engine."""

    @property
    def replica_size(self) -> int:
        """Ranks that work on the same sequences; data parallelism is the world size divided by it."""
        return self.tp * self.pp * self.cp


@dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    interval: Positive = 1000
    """Steps between checkpoints; the end of the stage and every stop save one too."""
    keep: Annotated[int, Field(ge=2)] = 2
    """Newest complete checkpoints kept; at least two, so that a damaged one has a predecessor."""
    async_save: bool = True
    """Go on training while a checkpoint is written, from a copy in host memory of each rank's share."""


@dataclass(frozen=True, config=STRICT)
class LoggingConfig:
    interval: Positive = 10
    tensorboard: bool = True
    wandb_project: Annotated[str, Field(pattern=r"^[^/\\#?%:]+$", max_length=128)] | None = None
    """Set to log to Weights & Biases: online when a key is there, offline files otherwise."""


@dataclass(frozen=True, config=STRICT)
class InitFrom:
    """Start from another stage's last checkpoint."""

    stage: str
    """Name of a sibling stage in the same `output_dir`, or the path of a stage folder."""
    load: Literal["weights", "weights+optimizer"] = "weights"
    pattern: Literal["own", "source"] = "own"
    """`source`: the layers stand in the order of that stage's, which may be chosen by measurement before it is trained;
    `model.pattern` says how many of each kind there are."""


@dataclass(frozen=True, config=STRICT)
class StageConfig:
    """One training stage; its folder is `output_dir/name`."""

    name: Annotated[str, Field(max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    output_dir: str
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)
    init_from: InitFrom | None = None
    evaluation: Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*[^\x00-\x20\x7f][^\x00-\x1f\x7f]*$")] | None = None
    """A command that is run once the stage is complete: by `submit` as a job of its own on one node, by `train` where
    it takes several stages. Quotes group its words, no shell reads it; `{folder}` stands for the stage's folder,
    `{python}` for the interpreter that trains."""
    seed: NonNegative = 1234

    @property
    def folder(self) -> Path:
        return Path(self.output_dir) / self.name

    @property
    def global_batch_size(self) -> int:
        """Packed sequences a step."""
        return self.train.global_batch_tokens // self.model.seq_length

    @property
    def total_steps(self) -> int:
        return -(-self.train.tokens // self.train.global_batch_tokens)

    def num_microbatches(self, data_parallel_size: int) -> int:
        return self.global_batch_size // (self.train.micro_batch_size * data_parallel_size)
