"""Everything that `eval run` can run, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.evaluation import longbench, paper, ruler
from megatron_palimpsa.evaluation.continuations import continue_prompts, require_states
from megatron_palimpsa.evaluation.results import TaskResult, mean
from megatron_palimpsa.evaluation.scorer import Progress, Scorer

PREFIX = "ruler/"
LENGTHS = (4096, 8192, 16384, 32768)
RULER_ITEMS = 500


@dataclass(frozen=True)
class Options:
    """Which tasks, over what."""

    tasks: tuple[str, ...]
    """Names, and the groups `paper`, `ruler` (what is generated) and `longbench_v2`."""
    data: Path | None = None
    include: tuple[Path, ...] = ()
    lengths: tuple[int, ...] = LENGTHS
    """Of RULER's samples, in tokens."""
    seed: int = 0
    """Of RULER's samples."""
    fewshot: int | None = None
    limit: int | None = None
    """Items of each task at the most."""

    def __post_init__(self) -> None:
        for folder in (*self.include, *([] if self.data is None else [self.data])):
            if not folder.is_dir():
                raise ConfigError(f"{folder}: is no folder")
        if not self.tasks:
            raise ConfigError("--tasks: name one at least")


@dataclass(frozen=True)
class Task:
    """One result; `run` may take long, everything that it needs is there."""

    name: str
    run: Callable[[Scorer], TaskResult]
    check: Callable[[Scorer], object] = lambda scorer: None
    """Raises ConfigError where the model's tokenizer does not do for the task."""
    generates: bool = False
    """Whether the model continues texts."""

    def require(self, scorer: Scorer) -> None:
        """Raises ConfigError where the model does not do for the task."""
        if self.generates:
            require_states(scorer, self.name)
        self.check(scorer)


def plan(options: Options) -> list[Task]:
    """The tasks in the order of their names' first mention, with their data.

    Raises:
        ConfigError: a name is unknown, a data set or a package is missing; nothing was evaluated yet.
    """
    names: dict[str, None] = {}
    for name in options.tasks:
        names |= dict.fromkeys(_members(name))
    of_harness = [name for name in names if not name.startswith(PREFIX) and name not in _LONGBENCH]
    harness = _Harness(of_harness, options) if of_harness else None
    tasks: list[Task] = []
    for name in names:
        if name.startswith(PREFIX):
            tasks += _ruler(name.removeprefix(PREFIX), options)
        elif name in _LONGBENCH:
            tasks.append(_longbench(name, options))
        else:
            assert harness is not None
            tasks.append(harness.task(name))
    return tasks


_LONGBENCH = (longbench.GENERATED, longbench.CHOSEN)


def _members(name: str) -> Sequence[str]:
    if name == "paper":
        return paper.TASKS
    if name == "ruler":
        return [PREFIX + task for task in ruler.GENERATED]
    if name == longbench.GENERATED:
        return _LONGBENCH
    if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in ruler.NAMES:
        raise ConfigError(
            f"--tasks: RULER has no task {name!r}; it has {', '.join(PREFIX + own for own in ruler.NAMES)}"
        )
    return [name]


class _Harness:
    def __init__(self, names: Sequence[str], options: Options) -> None:
        from megatron_palimpsa.evaluation import harness

        self._module, self._options = harness, options
        self._tasks = harness.HarnessTasks(names, options.include, options.data)

    def task(self, name: str) -> Task:
        loaded = self._tasks.load(name)
        return Task(
            name,
            lambda scorer: self._module.run(name, loaded, scorer, self._options.fewshot, self._options.limit),
            generates=self._module.generates(loaded),
        )


def _ruler(name: str, options: Options) -> list[Task]:
    task = ruler.Sources(options.data).task(name)
    count = min(options.limit or RULER_ITEMS, RULER_ITEMS)

    def sample(scorer: Scorer, length: int, index: int) -> ruler.Sample:
        def tokens(texts: Sequence[str]) -> Sequence[int]:
            return np.diff(scorer.tokenizer.encode_flat(texts).offsets).tolist()

        return ruler.make_sample(task, length, options.seed, index, tokens)

    def run(scorer: Scorer, length: int) -> TaskResult:
        samples = []
        progress = Progress(scorer.task, "samples to make")
        for index in range(count):
            samples.append(sample(scorer, length, index))
            progress(index + 1, count)
        prompts = scorer.encode([one.prompt for one in samples])
        texts = continue_prompts(scorer, prompts, task.answer_tokens)
        given: list[dict[str, Any]] = [
            {"answers": list(one.answers), "prediction": text, "score": task.score(text, one.answers)}
            for one, text in zip(samples, texts, strict=True)
        ]
        scores = mean([one["score"] for one in given])
        return TaskResult(f"{PREFIX}{name}/{length}", count, {"score": scores}, {"samples": given})

    return [
        Task(
            f"{PREFIX}{name}/{length}",
            partial(run, length=length),
            partial(sample, length=length, index=0),
            generates=True,
        )
        for length in options.lengths
    ]


def _longbench(name: str, options: Options) -> Task:
    items = longbench.read_items(longbench.find_file(options.data))[: options.limit]
    generates = name == longbench.GENERATED
    evaluate = longbench.generate if generates else longbench.choose
    return Task(name, lambda scorer: evaluate(items, scorer), longbench.require_room, generates)
