"""Data sets of the paper's tasks with a few rows each, in folders as the hub's have them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_TEXT = "abc def ghi jab cde fgh ija bcd"


def write_hub_data(folder: Path, rows: int = 3) -> Path:
    """-> folder."""
    numbers = range(rows)
    page = {"page": f" = {_TEXT} = \n " + f"{_TEXT} . " * 8}
    _write(folder, "EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", ("train", "validation", "test"), [page])
    texts = [{"text": f"{_TEXT} {'abc'[number % 3]}a"} for number in numbers]
    _write(folder, "EleutherAI/lambada_openai", "default", ("test",), texts)
    goals = [{"goal": f"a {n}", "sol1": "abc def", "sol2": "ghi", "label": n % 2} for n in numbers]
    _write(folder, "baber/piqa", None, ("train", "validation"), goals)
    endings = {"endings": ["abc.", "def ghi.", "jab.", "cde fgh ija."], "activity_label": "Abc"}
    scenes = [{**endings, "ctx_a": f"{_TEXT}.", "ctx_b": "he", "label": str(n % 4), "ind": n} for n in numbers]
    _write(folder, "Rowan/hellaswag", None, ("train", "validation"), scenes)
    pairs = [
        {"sentence": "abc def _ ghi.", "option1": "jab", "option2": "cde", "answer": str(n % 2 + 1)} for n in numbers
    ]
    _write(folder, "allenai/winogrande", "winogrande_xl", ("train", "validation"), pairs)
    choices = {"text": ["abc", "def", "ghi"], "label": ["A", "B", "C"]}
    questions = [{"question": f"{_TEXT} {n}?", "choices": choices, "answerKey": "ABC"[n % 3]} for n in numbers]
    for name in ("ARC-Easy", "ARC-Challenge"):
        _write(folder, "allenai/ai2_arc", name, ("train", "validation", "test"), questions)
    answers = {"answerA": "abc", "answerB": "def", "answerC": "ghi jab"}
    social = [{"context": _TEXT, "question": f"a {n}?", **answers, "label": str(n % 3 + 1)} for n in numbers]
    _write(folder, "lighteval/siqa", None, ("train", "validation"), social)
    return folder


def _write(folder: Path, path: str, config: str | None, splits: Sequence[str], rows: list[dict[str, Any]]) -> None:
    place = folder / path
    (place / (config or "")).mkdir(parents=True)
    for split in splits:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (place / (config or "") / f"{split}.jsonl").write_text(lines)
    if config is not None:
        readme = place / "README.md"
        known = readme.read_text().removesuffix("---\n") if readme.is_file() else "---\nconfigs:\n"
        files = "".join(f"  - split: {split}\n    path: {config}/{split}.jsonl\n" for split in splits)
        readme.write_text(f"{known}- config_name: {config}\n  data_files:\n{files}---\n")
