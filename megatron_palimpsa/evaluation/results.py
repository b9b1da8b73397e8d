"""Results of tasks, and the folder that keeps them: what is done is kept, whatever happens then."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from palimpsa_data.files import json_bytes, write_atomically
from torch import nn

from megatron_palimpsa.config import ConfigError, read_as, writable_place


@dataclass(frozen=True)
class Metric:
    value: float
    stderr: float | None = None
    """Of the mean over items; None where it is none."""


@dataclass(frozen=True)
class TaskResult:
    """What one task gave."""

    task: str
    items: int
    metrics: dict[str, Metric]
    """By name; those of a group's or a tag's tasks as `task/metric`."""
    details: dict[str, Any] = field(default_factory=dict)
    """What else there is to say: settings, truncation, single answers."""


def mean(values: list[float]) -> Metric:
    """With the standard error of independent items."""
    average = sum(values) / len(values)
    if len(values) < 2:
        return Metric(average)
    variance = sum((value - average) ** 2 for value in values) / (len(values) - 1)
    return Metric(average, (variance / len(values)) ** 0.5)


def weights_sha256(model: nn.Module) -> str:
    """Of all weights by name as they were loaded, wherever and in whatever format they lay."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class ResultFolder:
    """`settings.json` (what was evaluated and how), `tasks/NAME.json`, each by one rename.

    Raises:
        ConfigError: it holds results of another model or other settings, or a file of it cannot be read.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        writable_place(path, "--output")
        self.path = path
        self.settings = json.loads(json_bytes(settings))
        place = path / "settings.json"
        if place.is_file():
            try:
                there = self._read(place)
            except ConfigError as error:
                raise ConfigError(f"{error}; name another --output, or remove {path}") from None
            require_same(path, there, self.settings)
        elif path.exists() and any(path.iterdir()):
            raise ConfigError(f"{path}: is there already and holds no results of an evaluation; name another --output")
        else:
            write_atomically(place, json_bytes(self.settings))

    def find(self, task: str) -> TaskResult | None:
        """What an earlier run has written, None where it has not."""
        path = self._of(task)
        if not path.is_file():
            return None
        try:
            result = read_as(TaskResult, self._read(path), str(path))
        except ConfigError as error:
            raise ConfigError(f"{error}; remove it to evaluate again") from None
        if result.task != task:
            raise ConfigError(f"{path}: is a result of {result.task}; remove it to evaluate again")
        return result

    def all(self) -> list[TaskResult]:
        """Of every task that is done, in the order of their files' names."""
        names = [path.stem.replace("--", "/") for path in sorted((self.path / "tasks").glob("*.json"))]
        return [result for name in names if (result := self.find(name)) is not None]

    def write(self, result: TaskResult) -> None:
        write_atomically(self._of(result.task), json_bytes(asdict(result)))

    def _of(self, task: str) -> Path:
        return self.path / "tasks" / f"{task.replace('/', '--')}.json"

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: cannot be read ({error})") from None
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: holds no JSON object")
        return content


def require_same(path: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Raises ConfigError naming every setting in which what lies at `path` differs."""
    differing = [
        f"{key}: {there.get(key)!r} there, {here.get(key)!r} here"
        for key in sorted(there.keys() | here.keys())
        if there.get(key) != here.get(key)
    ]
    if differing:
        raise ConfigError(
            f"{path} holds results with other settings ({'; '.join(differing)}); name another --output, or remove it"
        )
