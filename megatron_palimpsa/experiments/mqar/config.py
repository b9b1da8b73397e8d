"""The settings of one model's sweep, as frozen dataclasses; wrong ones are refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from megatron_palimpsa.config import (
    ConfigError,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    StageConfig,
    TrainConfig,
    apply_overrides,
    check_stage,
    read_as,
    read_tree,
)
from megatron_palimpsa.config.values import STRICT, Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat

MOST_NUMBERS = 1 << 24
"""Random numbers of one kind that an example may take: it has as many counters of its own."""
MOST_EXAMPLES = 1 << 39
"""Of one seed, so that their counters are different 64-bit numbers."""


@dataclass(frozen=True, config=STRICT)
class Task:
    """What the examples of all lengths have in common; the vocabulary is the model's."""

    filler: Literal["blank", "random"] = "blank"
    """What stands between the queries: token 0, or a random token each (Zoology's two ways)."""
    power: Annotated[float, Field(gt=0, le=10)] = 0.01
    """The gap g between the pairs and a query has a probability in proportion to g ** (power - 1); 1 is uniform."""


@dataclass(frozen=True, config=STRICT)
class Lesson:
    """A part of the curriculum: examples of one length, with an optimizer and a learning-rate schedule of its own."""

    length: Positive
    """Tokens of an example."""
    pairs: Positive
    """Keys with their values in an example, and as many queries."""
    epochs: Positive
    batch_size: Positive


@dataclass(frozen=True, config=STRICT)
class Training:
    """AdamW, with a linear warm-up and a cosine down to zero over each lesson."""

    examples: Positive
    """Of each lesson; every epoch goes through them in another order, full batches only."""
    test_examples: Positive
    precision: Literal["bf16", "fp32"] = "fp32"
    """bf16 keeps fp32 copies of the weights for the optimizer."""
    weight_decay: NonNegativeFloat = 0.1
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: PositiveFloat = 1e-8
    warmup_steps: NonNegative = 0
    clip_grad: PositiveFloat | None = None
    """Largest norm of all gradients together; None: no limit."""
    stop_at_accuracy: Annotated[float, Field(gt=0, le=1)] | None = None
    """Test accuracy behind which the next lesson begins early; None: all epochs of each."""


@dataclass(frozen=True, config=STRICT)
class Selection:
    """Which runs the sweep consists of; more of them may join later."""

    lrs: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]
    seeds: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**31)], ...], Field(min_length=1)]


@dataclass(frozen=True, config=STRICT)
class SweepConfig:
    """One model's sweep; its runs lie in `output_dir/name`."""

    name: Annotated[str, Field(max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Not `report`, which stands beside the sweeps."""
    output_dir: str
    model: ModelConfig
    task: Task
    curriculum: Annotated[tuple[Lesson, ...], Field(min_length=1)]
    train: Training
    sweep: Selection

    @property
    def folder(self) -> Path:
        return Path(self.output_dir) / self.name


def load_sweep(path: str | Path, overrides: Sequence[str] = ()) -> SweepConfig:
    """Read a recipe with its bases, apply `section.key=value` overrides, check everything.

    Raises:
        ConfigError: names the file, the key, the value and what is allowed.
    """
    tree = read_tree(path)
    apply_overrides(tree, overrides)
    config = read_as(SweepConfig, tree, str(path))
    check_sweep(config, str(path))
    return config


def check_sweep(config: SweepConfig, where: str) -> None:
    """Refuse combinations that cannot run.

    Raises:
        ConfigError: names `where`, the key, its value and what is allowed.
    """
    if config.name == "report":
        raise ConfigError(f"{where}: name={config.name!r} is the folder of the report, which stands beside the sweeps")
    keys = max(config.model.vocab_size // 2 - 1, 0)
    longest = max(lesson.length for lesson in config.curriculum)
    for key, value, most in (
        ("model.vocab_size", config.model.vocab_size, MOST_NUMBERS),
        ("the longest lesson's length", longest, MOST_NUMBERS),
        ("train.examples", config.train.examples, MOST_EXAMPLES),
        ("train.test_examples", config.train.test_examples, MOST_EXAMPLES),
    ):
        if value > most:
            raise ConfigError(f"{where}: {key}={value} is above {most}, behind which examples would not be independent")
    for number, lesson in enumerate(config.curriculum):
        key = f"{where}: curriculum.{number}"
        if lesson.length % 2 or lesson.length < 4 * lesson.pairs:
            raise ConfigError(
                f"{key}.length={lesson.length} must be even and at least 4 * pairs, which is {4 * lesson.pairs}"
            )
        if lesson.pairs > keys:
            raise ConfigError(
                f"{key}.pairs={lesson.pairs}: model.vocab_size={config.model.vocab_size} has {keys} keys "
                f"(half of it, without token 0)"
            )
        if lesson.batch_size > config.train.examples:
            raise ConfigError(f"{key}.batch_size={lesson.batch_size} is above train.examples={config.train.examples}")
        if config.train.warmup_steps >= lesson.epochs * (config.train.examples // lesson.batch_size):
            raise ConfigError(f"{key}: train.warmup_steps={config.train.warmup_steps} leaves nothing of the lesson")
    if config.model.seq_length < longest:
        raise ConfigError(
            f"{where}: model.seq_length={config.model.seq_length} is below the longest lesson, which has {longest}"
        )
    for key, values in (("lrs", config.sweep.lrs), ("seeds", config.sweep.seeds)):
        if len(set(values)) < len(values):
            raise ConfigError(f"{where}: sweep.{key}={list(values)} names one twice")
    try:
        check_stage(stage_of(config, config.sweep.lrs[0], config.sweep.seeds[0]))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def stage_of(config: SweepConfig, lr: float, seed: int) -> StageConfig:
    """What `build_model` is given: the model's section, the precision and the seed count."""
    length = config.model.seq_length
    return StageConfig(
        name=config.name,
        output_dir=config.output_dir,
        model=config.model,
        data=DataConfig(train_blend="", valid_blend="", tokenizer=""),
        train=TrainConfig(tokens=length, global_batch_tokens=length, precision=config.train.precision),
        optimizer=OptimizerConfig(lr=lr, schedule="constant"),
        parallel=ParallelConfig(distributed_optimizer=False),
        seed=seed,
    )


def settings(config: SweepConfig) -> dict[str, Any]:
    """What all runs in a sweep's folder have in common, as plain values."""
    tree: dict[str, Any] = dataclasses.asdict(config)  # type: ignore[call-overload]
    return {key: value for key, value in tree.items() if key not in ("output_dir", "sweep")}
