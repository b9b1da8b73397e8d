"""One run: the curriculum, epoch after epoch, each followed by a test and a checkpoint."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.experiments.mqar.config import Lesson, SweepConfig
from megatron_palimpsa.experiments.mqar.examples import (
    Examples,
    Shape,
    make_examples,
    shuffled,
    test_seed,
    train_seed,
)
from megatron_palimpsa.experiments.mqar.files import write_whole
from megatron_palimpsa.experiments.mqar.learner import Learner, lr_fraction
from megatron_palimpsa.experiments.mqar.records import (
    Record,
    Run,
    epoch_tokens,
    has_diverged,
    next_epoch,
    read_records,
    write_result,
)


class Watch(Protocol):
    """Who wants to know how far a run is, and may stop it between two epochs."""

    def may_begin(self, config: SweepConfig, lesson: Lesson) -> bool:
        """Whether there is time for an epoch of the lesson."""

    def epoch_done(self, run: Run, records: Sequence[Record]) -> None:
        """The epoch of the last record is saved."""


def train_run(run: Run, watch: Watch) -> bool:
    """Train the run from where it is, in the process groups of this process.

    Args:
        run: locked by this process.

    Returns:
        Whether the run is finished.

    Raises:
        ConfigError: its checkpoint is damaged.
    """
    config = run.config
    records = read_records(run)
    learner = Learner(config, run.lr, run.seed)
    if records:
        place = next_epoch(config, records)
        _load(run, learner, with_moments=place is not None and place[1] > 0)
    lesson_number, train, test = None, None, None
    while (place := next_epoch(config, records)) is not None:
        number, epoch = place
        lesson = config.curriculum[number]
        if not watch.may_begin(config, lesson):
            return False
        if train is None or test is None or number != lesson_number:
            lesson_number, train, test = number, None, None
            train, test = _examples(run, lesson, learner.device)
            if epoch == 0:
                learner.begin_lesson()
        start = time.monotonic()
        order = shuffled(len(train), f"{run.seed}/{number}/{epoch}", learner.device)
        train_loss = _train_epoch(learner, train, order, config, lesson, epoch)
        accuracy, loss, memory = learner.evaluate(test, lesson.batch_size)
        records.append(
            {
                "lesson": number,
                "length": lesson.length,
                "pairs": lesson.pairs,
                "epoch": epoch,
                "train_loss": _finite(train_loss),
                "accuracy": accuracy,
                "loss": _finite(loss),
                "memory": {
                    str(layer): {kind: _finite(value) for kind, value in values.items()}
                    for layer, values in memory.items()
                },
                "tokens": epoch_tokens(config, lesson),
                "seconds": time.monotonic() - start,
            }
        )
        _save(run, learner.state(), records)
        watch.epoch_done(run, records)
    write_result(
        run,
        {
            "model": config.name,
            "lr": run.lr,
            "seed": run.seed,
            "diverged": has_diverged(records[-1]),
            "device": torch.cuda.get_device_name() if learner.device.type == "cuda" else "CPU",
            "torch": torch.__version__,
            "records": records,
        },
    )
    return True


def _examples(run: Run, lesson: Lesson, device: torch.device) -> tuple[Examples, Examples]:
    """Training and test examples of a lesson; no example of the one is one of the other but by chance."""
    config = run.config
    shape = Shape(config.model.vocab_size, lesson.length, lesson.pairs, config.task.filler, config.task.power)
    counts = (train_seed(run.seed), config.train.examples), (test_seed(run.seed), config.train.test_examples)
    train, test = (make_examples(shape, seed, torch.arange(count, device=device)) for seed, count in counts)
    return train, test


def _train_epoch(
    learner: Learner,
    examples: Examples,
    order: Tensor,
    config: SweepConfig,
    lesson: Lesson,
    epoch: int,
) -> float:
    """-> mean loss over the epoch's queries."""
    learner.model.train()
    batches = len(order) // lesson.batch_size
    losses = []
    for number, index in enumerate(order[: batches * lesson.batch_size].split(lesson.batch_size)):
        fraction = lr_fraction(epoch * batches + number, lesson.epochs * batches, config.train.warmup_steps)
        losses.append(learner.step(examples.batch(index), fraction))
    learner.model.eval()
    return float(torch.stack(losses).double().mean())


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _save(run: Run, tensors: Mapping[str, Tensor], records: list[Record]) -> None:
    """Weights, moments and records in one file, by one rename."""
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(records, allow_nan=False)
    metadata = {"records": text, "run": run.name, "sha256": _sha256(tensors, text)}
    write_whole(run.checkpoint, save(tensors, metadata))


def _load(run: Run, learner: Learner, with_moments: bool) -> None:
    path = run.checkpoint
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        of = metadata.get("run", run.name)
        if of != run.name:
            raise ValueError(f"it is of {of}")
        # The first checkpoints had none.
        if metadata.get("sha256") not in (None, _sha256(tensors, metadata["records"])):
            raise ValueError("its checksum is another")
        learner.load(tensors, with_moments)
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(f"{path}: damaged ({error}); remove it to train the run again") from None


def _sha256(tensors: Mapping[str, Tensor], records: str) -> str:
    """Of tensors on the CPU with their names and shapes, and of the records."""
    digest = hashlib.sha256(records.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {list(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
