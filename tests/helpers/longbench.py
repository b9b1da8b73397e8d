"""Questions in LongBench v2's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def entry(number: int) -> dict[str, Any]:
    choices = {
        f"choice_{letter}": f"{text} {number}" for letter, text in zip("ABCD", ("abc", "de", "fg", "jab"), strict=True)
    }
    text = f"abc def {number} ghi " * 10
    answer = "ABCD"[number % 4]
    kind = {"difficulty": "hard" if number % 2 else "easy", "length": "short"}
    return {"_id": f"q{number}", "context": text, "question": f"which {number}?", "answer": answer, **kind, **choices}


def write_longbench(folder: Path, count: int = 3) -> Path:
    """-> folder."""
    (folder / "longbench_v2.json").write_text(json.dumps([entry(number) for number in range(count)]))
    return folder
