"""Tasks of our own for lm-evaluation-harness: a data set's folder and YAML files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

ITEMS = [
    {"question": "abc def", "choices": [" ghi", " jab cde", " f"], "answer": 1},
    {"question": "jih", "choices": [" a", " bcd", " efg hij"], "answer": 0},
    {"question": "cab fed ", "choices": ["gh", "ij", "ab"], "answer": 2},
]


def write_own_data(folder: Path) -> None:
    """The data set `own` below `folder`."""
    (folder / "own").mkdir()
    (folder / "own" / "test.jsonl").write_text("".join(json.dumps(item) + "\n" for item in ITEMS))


def write_own_tasks(folder: Path) -> Path:
    """`own_choice` and `own_writing` over it -> folder."""
    task: dict[str, Any] = {
        "dataset_path": "own",
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "target_delimiter": "",
        "metadata": {"version": 3},
    }
    choice = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
    scores = {"metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}
    write = {"output_type": "generate_until", "doc_to_target": "a", "metric_list": [{"metric": "exact_match"}]}
    settings = {"generation_kwargs": {"until": ["b"], "max_gen_toks": 6, "do_sample": False}}
    for name, own in (("own_choice", choice | scores), ("own_writing", write | settings)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **task, **own}))
    return folder
