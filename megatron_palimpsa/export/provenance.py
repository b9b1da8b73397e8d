"""Where an exported model's weights come from: what its run recorded, which goes with it into a stage and out again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_palimpsa.config import ConfigError, StageConfig
from megatron_palimpsa.convert.sources import read_json
from megatron_palimpsa.training.checkpoint_state import read_state
from megatron_palimpsa.training.metrics import read_records
from megatron_palimpsa.training.run_folder import RunFolder

PROVENANCE = "provenance.json"
"""Lines of the model card by their names, in an export and in a stage that was made of one."""


def read_provenance(folder: Path) -> dict[str, str]:
    """What an export, or a stage made of one, says; nothing where it says nothing.

    Raises:
        ConfigError: it cannot be read.
    """
    path = folder / PROVENANCE
    if not path.is_file():
        return {}
    facts = read_json(path)
    if not all(isinstance(value, str) for value in facts.values()):
        raise ConfigError(f"{path}: holds something else than text by name")
    return facts


def write_provenance(folder: Path, facts: dict[str, str]) -> None:
    """Write what there is."""
    if facts:
        (folder / PROVENANCE).write_text(json.dumps(facts, indent=2) + "\n")


def provenance_of(folder: RunFolder, checkpoint: Path, config: StageConfig) -> dict[str, str]:
    """What is known of the weights in a checkpoint of a stage's folder.

    Raises:
        ConfigError: what came with the stage cannot be read.
    """
    # A stage that was made of an export has no run of its own.
    return read_provenance(folder.path) or dict(_of_run(folder, checkpoint, config))


def _of_run(folder: RunFolder, checkpoint: Path, config: StageConfig) -> Iterator[tuple[str, str]]:
    state = read_state(checkpoint)
    progress = state.get("progress") or {}
    if progress.get("tokens"):
        yield "stage", config.name + (f", after {config.init_from.stage}" if config.init_from else "")
        yield "trained", f"{progress['step']:,} steps, {progress['tokens']:,} tokens of this stage"
        yield "sequence", f"{config.model.seq_length:,} tokens"
    if sets := (progress.get("data") or {}).get("sets"):
        total = sum(item["weight"] for item in sets)
        yield "data", ", ".join(f"{item['name']} ({item['weight'] / total:.1%})" for item in sets)
    yield from _losses(folder, int(state["step"]))
    if commit := _commit(folder.path):
        yield "code", f"git commit {commit}"


def _losses(folder: RunFolder, step: int) -> Iterator[tuple[str, str]]:
    """The last ones up to the checkpoint's step."""
    records = [record for record in read_records(folder.metrics) if record["step"] <= step]
    for kind, what in (("train", "training loss"), ("valid", "validation loss")):
        losses = [record for record in records if record["kind"] == kind and record.get("loss") is not None]
        if losses:
            yield what, f"{losses[-1]['loss']:.4f} at step {losses[-1]['step']:,}"


def _commit(folder: Path) -> str | None:
    """Of the code that a submitted stage was started with."""
    try:
        record: Any = json.loads((folder / "job" / "submission.json").read_text())
        return f"{record['git_commit']}{' with changes' if record.get('git_changed') else ''}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
