"""One YAML file a stage, read strictly into frozen dataclasses.

`load_stage(path, overrides)` follows `base:`, applies dotted overrides (`train.micro_batch_size=2`), refuses unknown
keys, wrong types and impossible combinations with a `ConfigError` that names the key, the value and what is allowed,
and needs neither torch nor a GPU to do so.
"""

from __future__ import annotations

import dataclasses
import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}

LAYER_SYMBOLS = {"P": "Palimpsa-M", "M": "Mamba2", "*": "attention", "-": "MLP"}


class ConfigError(ValueError):
    """Wrong input, found before anything starts; the command line turns it into exit code 2."""


def parse_count(value: Any) -> Any:
    """`10B`, `1.5M`, `64Ki` or a plain integer -> int (K, M, B, T are powers of 1000; Ki, Mi, Gi powers of 1024)."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|[KMBT]?)", value.strip())
    if match is None:
        raise ValueError(f"expected a count such as 4096, 64Ki, 1.5M or 10B, not {value!r}")
    return round(Decimal(match[1]) * _SUFFIXES[match[2]])


_LARGEST = 2**63 - 1  # what torch takes for a size or a seed
Count = Annotated[int, BeforeValidator(parse_count), Field(gt=0, le=_LARGEST)]
Positive = Annotated[int, Field(gt=0, le=_LARGEST)]
NonNegative = Annotated[int, Field(ge=0, le=_LARGEST)]
_LARGEST_FLOAT = 1e30  # float32 still has room to compute with it
PositiveFloat = Annotated[float, Field(gt=0, le=_LARGEST_FLOAT, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=_LARGEST_FLOAT, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, config=_STRICT)
class ModelConfig:
    """Geometry and initialisation; the names follow Mamba2's (`d_state` is K, `headdim` is V of palimpsa_kernels)."""

    pattern: Annotated[str, Field(min_length=1)]
    """One letter a layer: P Palimpsa-M, M Mamba2, * attention, - MLP; `|` marks pipeline-stage borders."""
    hidden_size: Positive
    vocab_size: Count
    """Ids the tokenizer may give; the embedding is padded up to a multiple of `vocab_multiple`."""
    seq_length: Count
    """Tokens in one packed sequence."""
    d_state: Positive = 128
    headdim: Positive = 64
    expand: Positive = 2
    ngroups: Positive = 1
    d_conv: Annotated[int, Field(ge=2)] = 4
    norm_groups: Positive | None = None
    """Groups of the gated RMSNorm; None follows `ngroups` (state-spaces, Hugging Face, Megatron)."""
    norm_eps: PositiveFloat = 1e-5
    vocab_multiple: Positive = 16
    tie_embeddings: bool = True
    fp32_residual: bool = True
    beta_rank: Positive = 128
    """Rank of beta's projection in P layers (48 for 170M, 96 for 760M; the authors' layer default is 128)."""
    beta_scale_init: Literal["scratch", "finetune", "finetune-effective"] = "scratch"
    """b_scale, raw under a softplus: `scratch` 1, `finetune` U(0.1, 1), `finetune-effective` softplus in U(0.1, 1)."""
    train_prior: bool = False
    dt_min: PositiveFloat = 1e-3
    dt_max: PositiveFloat = 1e-1
    init_std: PositiveFloat = 0.02
    num_attention_heads: Positive | None = None
    num_query_groups: Positive | None = None
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


@dataclass(frozen=True, config=_STRICT)
class DataConfig:
    """Blend files (YAML lists of {set, weight, epochs}) of prepared sets; paths are relative to the working folder."""

    train_blend: str
    valid_blend: str
    tokenizer: str
    """SentencePiece `.model` file that the shards were made with."""
    packing: Literal["concat", "best-fit"] = "concat"
    """`concat` cuts one stream of documents every seq_length tokens; `best-fit` keeps them whole where they fit."""


@dataclass(frozen=True, config=_STRICT)
class TrainConfig:
    """How long, how much at once and in which precision."""

    tokens: Count
    """Tokens of the stage; it ends with the first step that reaches them."""
    global_batch_tokens: Count
    micro_batch_size: Positive = 1
    """Packed sequences a rank takes through the model at once."""
    precision: Literal["bf16", "fp32"] = "bf16"
    recompute: Literal["none", "full"] = "none"
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


@dataclass(frozen=True, config=_STRICT)
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


@dataclass(frozen=True, config=_STRICT)
class ParallelConfig:
    """Layout; data parallelism is what the world size leaves over."""

    engine: Literal["megatron"] = "megatron"
    tp: Positive = 1
    pp: Positive = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = True


@dataclass(frozen=True, config=_STRICT)
class CheckpointConfig:
    interval: Positive = 1000
    """Steps between checkpoints; the end of the stage and every stop save one too."""
    keep: Annotated[int, Field(ge=2)] = 2
    """Newest complete checkpoints kept; at least two, so that a damaged one has a predecessor."""


@dataclass(frozen=True, config=_STRICT)
class LoggingConfig:
    interval: Positive = 10
    tensorboard: bool = True
    wandb_project: Annotated[str, Field(pattern=r"^[^/\\#?%:]+$", max_length=128)] | None = None
    """Set to log to Weights & Biases: online when a key is there, offline files otherwise."""


@dataclass(frozen=True, config=_STRICT)
class InitFrom:
    """Start from another stage's last checkpoint."""

    stage: str
    """Name of a sibling stage in the same `output_dir`, or the path of a stage folder."""
    load: Literal["weights", "weights+optimizer"] = "weights"


@dataclass(frozen=True, config=_STRICT)
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


def check_stage(config: StageConfig, world_size: int = 1) -> None:
    """Refuse combinations that cannot run on `world_size` ranks.

    Raises:
        ConfigError: names the key, its value and what is allowed.
    """
    model, train, parallel = config.model, config.train, config.parallel
    unknown = sorted(set(model.pattern) - set(LAYER_SYMBOLS) - {"|"})
    if unknown:
        allowed = ", ".join(f"{symbol} ({meaning})" for symbol, meaning in LAYER_SYMBOLS.items())
        raise ConfigError(
            f"model.pattern={model.pattern!r}: unknown letter {unknown[0]!r}; allowed are {allowed} and |"
        )
    if not model.layers:
        raise ConfigError(f"model.pattern={model.pattern!r}: holds no layer")
    _divides("model.headdim", model.headdim, "d_inner (expand * hidden_size)", model.d_inner)
    _divides("model.ngroups", model.ngroups, "the number of heads", model.nheads)
    if model.norm_groups is not None:
        _divides("model.norm_groups", model.norm_groups, "d_inner (expand * hidden_size)", model.d_inner)
    _divides("parallel.tp", parallel.tp, "the number of heads (expand * hidden_size / headdim)", model.nheads)
    _divides("parallel.tp", parallel.tp, "the padded vocabulary", model.padded_vocab_size)
    if "*" in model.layers:
        _check_attention(model, parallel.tp)
    if "-" in model.layers:
        if model.ffn_hidden_size is None:
            raise ConfigError("model.ffn_hidden_size is missing: the pattern has MLP layers (-)")
        _divides("parallel.tp", parallel.tp, "model.ffn_hidden_size", model.ffn_hidden_size)
    _check_pipeline(model, parallel.pp)
    if parallel.sequence_parallel:
        if parallel.tp == 1:
            raise ConfigError("parallel.sequence_parallel=true needs parallel.tp > 1")
        tokens = train.micro_batch_size * model.seq_length
        _divides("parallel.tp", parallel.tp, "the tokens of a microbatch (sequence parallel)", tokens)
    check_ranks(parallel, world_size)
    _check_batch(config, world_size // (parallel.tp * parallel.pp))
    if model.dt_min >= model.dt_max:
        raise ConfigError(f"model.dt_min={model.dt_min} must be below model.dt_max={model.dt_max}")
    optimizer = config.optimizer
    if optimizer.min_lr > optimizer.lr:
        raise ConfigError(f"optimizer.min_lr={optimizer.min_lr} is above optimizer.lr={optimizer.lr}")
    if optimizer.warmup_steps >= config.total_steps and optimizer.schedule != "constant":
        raise ConfigError(
            f"optimizer.warmup_steps={optimizer.warmup_steps} leaves nothing of the stage's {config.total_steps} steps"
        )


def check_ranks(parallel: ParallelConfig, world_size: int) -> None:
    """Raises ConfigError where the layout does not divide the ranks."""
    if world_size % (parallel.tp * parallel.pp):
        raise ConfigError(
            f"parallel.tp={parallel.tp} * parallel.pp={parallel.pp} does not divide the {world_size} ranks started"
        )


def _divides(key: str, value: int, what: str, whole: int) -> None:
    if whole % value:
        raise ConfigError(f"{key}={value} does not divide {what}, which is {whole}")


def _check_attention(model: ModelConfig, tp: int) -> None:
    if model.num_attention_heads is None:
        raise ConfigError("model.num_attention_heads is missing: the pattern has attention layers (*)")
    _divides("model.num_attention_heads", model.num_attention_heads, "model.hidden_size", model.hidden_size)
    groups = model.num_query_groups or model.num_attention_heads
    _divides("model.num_query_groups", groups, "model.num_attention_heads", model.num_attention_heads)
    _divides("parallel.tp", tp, "model.num_query_groups", groups)


def _check_pipeline(model: ModelConfig, pp: int) -> None:
    stages = model.pattern.split("|")
    if pp == 1:
        return
    if len(stages) == 1:
        if len(model.layers) % pp:
            raise ConfigError(
                f"parallel.pp={pp} does not divide the {len(model.layers)} layers of model.pattern={model.pattern!r}; "
                f"mark the stages with | in the pattern"
            )
    elif len(stages) != pp or not all(stages):
        raise ConfigError(
            f"model.pattern={model.pattern!r} marks {len(stages)} pipeline stages (none may be empty), "
            f"parallel.pp is {pp}"
        )


def _check_batch(config: StageConfig, data_parallel_size: int) -> None:
    train, seq_length = config.train, config.model.seq_length
    step = train.micro_batch_size * data_parallel_size * seq_length
    if train.global_batch_tokens % step:
        raise ConfigError(
            f"train.global_batch_tokens={train.global_batch_tokens} is not a multiple of {step} "
            f"(train.micro_batch_size {train.micro_batch_size} * data-parallel size {data_parallel_size} "
            f"* model.seq_length {seq_length})"
        )


def load_stage(path: str | Path, overrides: list[str] | None = None) -> StageConfig:
    """Read a stage's YAML with its bases, apply `section.key=value` overrides, check types.

    Raises:
        ConfigError: names the file, the key, the value and what is allowed.
    """
    tree = _read_tree(Path(path), ())
    for override in overrides or []:
        _apply_override(tree, override)
    return stage_from_dict(tree, where=str(path))


def stage_from_dict(tree: dict[str, Any], where: str) -> StageConfig:
    try:
        # Through JSON, where strict typing takes mappings for dataclasses and whole numbers for floats.
        return TypeAdapter(StageConfig).validate_json(json.dumps(tree))
    except ValidationError as error:
        raise ConfigError(_describe(error, where)) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {error}") from None


def to_dict(config: StageConfig) -> dict[str, Any]:
    return dataclasses.asdict(config)  # type: ignore[call-overload]


def save_resolved(config: StageConfig, path: Path) -> None:
    """Write the whole configuration, defaults included, so that the run can be read and repeated without its bases."""
    path.write_text(yaml.safe_dump(to_dict(config), sort_keys=False))


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML as it is meant: a key given twice or a NUL is an error, `1e-4` is a number, a date is text."""


def _construct_unique(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"{node.start_mark.name}, line {node.start_mark.line + 1}: key {key!r} is given twice")
    return loader.construct_mapping(node, deep=True)


def _construct_text(loader: _UniqueKeyLoader, node: yaml.ScalarNode) -> str:
    if "\0" in node.value:
        raise ConfigError(f"{node.start_mark.name}, line {node.start_mark.line + 1}: {node.value!r} holds a NUL")
    return loader.construct_scalar(node)


_UniqueKeyLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_unique)
_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG, _construct_text)
_UniqueKeyLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse_yaml(text: str, where: str) -> Any:
    try:
        loader = _UniqueKeyLoader(text)
        loader.name = where
        return loader.get_single_data()
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:
        # PyYAML lets through what its conversions raise: `!!int x`, an integer of 5000 digits, a thousand brackets.
        raise ConfigError(f"{where}: not valid YAML: {error}") from None


def _read_tree(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in seen:
        raise ConfigError(f"{path}: base files form a circle")
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from None
    tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, found {type(tree).__name__}")
    base = tree.pop("base", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base={base!r} must be the path of a YAML file")
    return _merge(_read_tree(path.parent / base, (*seen, path.resolve())), tree)


def _merge(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in change.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r}: expected section.key=value")
    *sections, name = key.split(".")
    for section in sections:
        child = tree.get(section)
        if child is None:
            child = tree[section] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {section!r} is not a section")
        tree = child
    tree[name] = parse_yaml(text, f"override {override!r}")


def _describe(error: ValidationError, where: str) -> str:
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "unexpected_keyword_argument":
            lines.append(f"{where}: unknown key {key!r}{_known_keys(item['loc'])}")
        elif item["type"] == "missing":
            lines.append(f"{where}: {key} is missing")
        else:
            lines.append(f"{where}: {key}={item['input']!r}: {item['msg']}")
    return "\n".join(lines)


def _known_keys(loc: tuple[int | str, ...]) -> str:
    kind: Any = StageConfig
    sections = {"model": ModelConfig, "data": DataConfig, "train": TrainConfig, "optimizer": OptimizerConfig}
    sections |= {"parallel": ParallelConfig, "checkpoint": CheckpointConfig, "logging": LoggingConfig}
    sections |= {"init_from": InitFrom}
    if len(loc) > 1:
        kind = sections.get(str(loc[0]), StageConfig)
    return f"; known keys are {', '.join(field.name for field in dataclasses.fields(kind))}"
