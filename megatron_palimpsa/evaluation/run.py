"""`eval run`: the tasks of one model, one after the other, each kept as soon as it is done."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any, Literal

from palimpsa_data.files import json_bytes, write_atomically

from megatron_palimpsa.evaluation import ruler
from megatron_palimpsa.evaluation.results import ResultFolder, TaskResult, weights_sha256
from megatron_palimpsa.evaluation.scorer import Scorer, Truncation
from megatron_palimpsa.evaluation.tables import markdown
from megatron_palimpsa.evaluation.tasks import Options, Task, plan
from megatron_palimpsa.inference import Opened, opened

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Reading:
    """How a model reads its inputs."""

    precision: Literal["bf16", "fp32"] | None = None
    """None is the stage's own."""
    max_length: int | None = None
    """Tokens of an input; None is the stage's `model.seq_length`, 0 is no limit."""
    batch_tokens: int = 16384
    """Tokens that go through the model at once."""
    tokenizer: Path | None = None
    """In place of the model's own."""


def run(model: Path, output: Path, options: Options, reading: Reading) -> Path:
    """Evaluate a model and write `output`; what is there already is kept. -> results.md.

    Raises:
        ConfigError: a task, its data or the model is not there, or `output` holds results of another model or settings.
    """
    tasks = plan(options)
    with opened(model, reading.precision, reading.tokenizer) as it:
        limit = it.config.model.seq_length if reading.max_length is None else reading.max_length or None
        scorer = Scorer(it, limit, reading.batch_tokens)
        for task in tasks:
            task.require(scorer)
        folder = ResultFolder(output, _settings(it, scorer, options))
        left = [task for task in tasks if folder.find(task.name) is None]
        logger.info("%s: %d tasks, %d of them done already", it.checkpoint, len(tasks), len(tasks) - len(left))
        for number, task in enumerate(left, 1):
            logger.info("%s (%d of %d)", task.name, number, len(left))
            folder.write(_run(task, scorer))
    return summarize(folder)


def _run(task: Task, scorer: Scorer) -> TaskResult:
    scorer.task, scorer.truncation = task.name, Truncation()
    result = task.run(scorer)
    logger.info("%s: %s", task.name, ", ".join(f"{name} {metric.value:.4g}" for name, metric in result.metrics.items()))
    return dataclasses.replace(result, details={"truncation": vars(scorer.truncation), **result.details})


def _settings(it: Opened, scorer: Scorer, options: Options) -> dict[str, Any]:
    """What two runs must have in common for their results to stand in one folder."""
    return {
        "weights": weights_sha256(it.model),
        "pattern": it.config.model.layers,
        "tokenizer": scorer.tokenizer.sha256,
        "precision": it.config.train.precision,
        "max_length": scorer.max_length,
        "fewshot": options.fewshot,
        "limit": options.limit,
        "seed": options.seed,
        "ruler_haystack": ruler.Sources(options.data).essays,
    }


def summarize(folder: ResultFolder) -> Path:
    """Write results.json, results.md and results.png of all tasks in the folder."""
    from megatron_palimpsa.evaluation import pictures

    results = folder.all()
    short = [
        {"task": one.task, "items": one.items, "metrics": {name: vars(m) for name, m in one.metrics.items()}}
        for one in results
    ]
    write_atomically(folder.path / "results.json", json_bytes({"settings": folder.settings, "results": short}))
    text = markdown(results)
    if pictures.draw(results, folder.path / "results.png"):
        text += "\n![results](results.png)\n"
    path = folder.path / "results.md"
    write_atomically(path, text.encode())
    return path
