"""lm-evaluation-harness: our models behind its interface, and its tasks one at a time.

This module alone needs the extra `eval`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.evaluation.continuations import continue_prompts
from megatron_palimpsa.evaluation.results import Metric, TaskResult
from megatron_palimpsa.evaluation.scorer import Scorer
from megatron_palimpsa.model.sampling import Sampling

# Standard errors that have no formula are bootstrapped; a pool of processes must not be forked behind CUDA.
os.environ.setdefault("DISABLE_MULTIPROC", "1")
try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.evaluator import evaluate
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._factory import TaskFactory
except ModuleNotFoundError as error:
    raise ConfigError(
        f"tasks of lm-evaluation-harness need the package {error.name}, which is not installed: "
        "in this project's folder .venv/bin/pip install -e '.[eval]' -c constraints.txt"
    ) from None

_BOOTSTRAPS = 1000
_SEED = 1234
_MOST_NEW_TOKENS = 256


class HarnessModel(LM):
    """A scorer as lm-evaluation-harness wants a model."""

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self._scorer = scorer

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self._scorer.log_likelihoods(self._scorer.encode_pairs([request.args for request in requests]))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        return self._scorer.rolling([request.args[0] for request in requests])

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        texts: list[str] = [""] * len(requests)
        settings = [normalize_gen_kwargs(request.args[1], _MOST_NEW_TOKENS) for request in requests]
        prompts = self._scorer.encode([request.args[0] for request in requests])
        alike: dict[str, list[int]] = {}
        for number, setting in enumerate(settings):
            alike.setdefault(repr(sorted(setting.items())), []).append(number)
        for numbers in alike.values():
            setting = settings[numbers[0]]
            temperature = setting.get("temperature", 1.0 if setting.get("do_sample") else 0.0)
            sampling = Sampling(temperature, int(setting.get("top_k", 0)), float(setting.get("top_p", 1.0)), _SEED)
            most = setting["max_gen_toks"]
            kept = [self._shortened(prompts[number], most) for number in numbers]
            found = continue_prompts(self._scorer, kept, most, setting["until"], sampling)
            for number, text in zip(numbers, found, strict=True):
                texts[number] = text
        return texts

    def _shortened(self, prompt: np.ndarray, max_new_tokens: int) -> np.ndarray:
        """Without its beginning where it would leave no room for the new tokens; never empty."""
        if not len(prompt):
            return np.array([self._scorer.tokenizer.eod_id], np.int32)
        limit = self._scorer.max_length
        kept = prompt if limit is None else prompt[-max(limit - max_new_tokens, 1) :]
        self._scorer.truncation.count(len(prompt), len(kept))
        return kept


class HarnessTasks:
    """Tasks, tags and groups of lm-evaluation-harness by name, with their data.

    Args:
        include: folders with more of them, as YAML files.
        data: where data sets lie under their names on the Hugging Face hub; None asks the hub, or its local cache.

    Raises:
        ConfigError: a name is unknown.
    """

    def __init__(self, names: Sequence[str], include: Sequence[Path], data: Path | None) -> None:
        self._manager = _task_manager(tuple(map(str, include)))
        self._factory = _LocalFactory(data)
        known = set(self._manager.all_tasks)
        for name in names:
            if name not in known:
                alike = ", ".join(sorted(other for other in known if name in other)[:10])
                hint = f"; there are {alike}" if alike else "; `--include FOLDER` adds YAML files of your own"
                raise ConfigError(f"--tasks: lm-evaluation-harness has no task, tag or group {name!r}{hint}")

    def load(self, name: str) -> dict[str, Any]:
        """A task with its data, as `evaluate` wants it.

        Raises:
            ConfigError: a data set is not there or not readable; names it, the task and the folder.
        """
        try:
            self._manager._factory = self._factory
            with _quiet():
                loaded = dict(self._manager.load([name]))
        except ConfigError:
            raise
        except Exception as error:  # `datasets`, the hub and tasks' own code raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(
                f"task {name}: its data cannot be loaded ({reason}); without a hub give --data FOLDER, where a data "
                f"set lies under its name on the hub"
            ) from None
        for task in loaded["tasks"].values():
            if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
                raise ConfigError(
                    f"task {name}: runs code that the model writes, or is about pictures or sound: not here"
                )
        return loaded


@functools.cache
def _task_manager(include: tuple[str, ...]) -> TaskManager:
    # It reads thousands of YAML files.
    return TaskManager(include_path=list(include) or None)


class _LocalFactory(TaskFactory):
    """Reads a task's data set below a folder."""

    def __init__(self, data: Path | None) -> None:
        super().__init__()
        self._data = data

    def _load_full_config(self, entry: Any, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
        config = super()._load_full_config(entry, overrides)
        path = config.get("dataset_path")
        # Names of formats, whose files a task names itself, have no slash on the hub either.
        if self._data is None or not path or path in _FORMATS:
            return config
        place = self._data / path
        if not place.is_dir():
            raise ConfigError(
                f"task {entry.name}: its data set {path} is not in --data {self._data} (the folder {place}, as "
                f"`hf download {path} --repo-type dataset --local-dir {place}` fills it)"
            )
        return {**config, "dataset_path": str(place)}


_FORMATS = {"json", "csv", "parquet", "text", "arrow"}


def generates(loaded: dict[str, Any]) -> bool:
    """Whether a loaded task, tag or group has the model continue texts."""
    return any(task.OUTPUT_TYPE == "generate_until" for task in loaded["tasks"].values())


def run(name: str, loaded: dict[str, Any], scorer: Scorer, fewshot: int | None, limit: int | None) -> TaskResult:
    """Evaluate a loaded task, tag or group.

    Args:
        fewshot: examples in the prompt; None is the task's own number, or none.
        limit: items of each task, the first ones; None for all.
    """
    random.seed(_SEED)
    np.random.seed(_SEED)
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        task.set_config("num_fewshot", (own or 0) if fewshot is None or own == 0 else fewshot)
        task.set_fewshot_seed(_SEED)
    with _quiet():
        found = evaluate(
            HarnessModel(scorer), loaded, limit=limit, bootstrap_iters=_BOOTSTRAPS, log_samples=False, verbosity=None
        )
    several = len(loaded["tasks"]) > 1
    metrics: dict[str, Metric] = {}
    for task, values in found["results"].items():
        prefix = f"{task}/" if several and task != name else ""
        metrics |= {f"{prefix}{metric}": value for metric, value in _metrics(values)}
    items = {task: counts["effective"] for task, counts in found["n-samples"].items()}
    details = {
        "versions": found["versions"],
        "fewshot": found["n-shot"],
        "items": items,
    }
    return TaskResult(name, sum(items.values()), metrics, details)


def _metrics(values: dict[str, Any]) -> Iterator[tuple[str, Metric]]:
    """lm-evaluation-harness's `acc,none` and `acc_stderr,none` -> `acc`; a filter other than none stays in the name."""
    for key, value in values.items():
        metric, comma, kind = key.partition(",")
        if not comma or metric.endswith("_stderr") or isinstance(value, str):
            continue
        stderr = values.get(f"{metric}_stderr,{kind}")
        name = metric if kind == "none" else f"{metric} ({kind})"
        yield name, Metric(float(value), None if stderr is None or isinstance(stderr, str) else float(stderr))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what lm-evaluation-harness prints; standard output is for our own lines."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
