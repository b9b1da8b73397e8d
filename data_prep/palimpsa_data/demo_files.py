"""The demo's texts as files of the kinds that people have: what `prep` reads.

FOLDER/NAME/part-I.jsonl    code as The Stack v2's rows, prose as FineWeb's, long text as rows with a text
FOLDER/NAME/part-I.json     instruction pairs as LongAlpaca's array
FOLDER/sources.json         which texts these are, and what was left out of each and why; written last
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from palimpsa_data.demo_sources import Pair, Sources, Text
from palimpsa_data.documents import Skipped
from palimpsa_data.errors import DataError
from palimpsa_data.files import json_bytes, json_sha256, read_json, write_atomically

_RECIPE = 2  # raise it when the same sources are to give other files
_VALID_SHARE = 16  # of 256 origins
SHARDS = {"train": 2, "valid": 1}
KINDS = ("code", "prose", "long", "instruct")


def write_files(folder: Path, sources: Sources) -> dict[str, dict[str, int]]:
    """Write the files of all kinds and splits unless they are there; -> what was left out of each, by reason."""
    record = folder / "sources.json"
    if not is_current(folder, sources):
        names = [(kind, split) for kind in KINDS for split in SHARDS]
        left_out = {
            f"{kind}-{split}": _write(folder / f"{kind}-{split}", kind, split, sources) for kind, split in names
        }
        write_atomically(record, json_bytes({"sha256": sources_sha256(sources), "left_out": left_out}))
    return read_json(record)["left_out"]


def is_current(folder: Path, sources: Sources) -> bool:
    """Whether the files are there and made of these sources."""
    try:
        content = read_json(folder / "sources.json")
    except DataError:
        return False
    if content.get("sha256") != sources_sha256(sources):
        return False
    return all(path.is_file() for kind in KINDS for split in SHARDS for path in files(folder, f"{kind}-{split}"))


def sources_sha256(sources: Sources) -> str:
    return json_sha256([_RECIPE, _VALID_SHARE, sources.sha256])


def files(folder: Path, name: str) -> list[Path]:
    """Where the parts of one kind and split lie."""
    kind, _, split = name.partition("-")
    suffix = "json" if kind == "instruct" else "jsonl"
    return [folder / name / f"part-{shard}.{suffix}" for shard in range(SHARDS[split])]


def is_valid_share(origin: str) -> bool:
    """Which side of the train/valid split all documents of a module or topic are on."""
    return hashlib.sha256(origin.encode()).digest()[0] < _VALID_SHARE


def documents(sources: Sources, kind: str, split: str) -> list[Text]:
    """Those of one side of the split, what is left out included."""
    return [text for text in sources.documents(kind) if is_valid_share(text.origin) == (split == "valid")]


def _write(folder: Path, kind: str, split: str, sources: Sources) -> dict[str, int]:
    left_out: Counter[str] = Counter()
    rows = []
    for text in documents(sources, kind, split):
        if isinstance(text.content, Skipped):
            left_out[text.content.reason] += 1
        else:
            rows.append(_row(kind, text.origin, text.content))
    parts = files(folder.parent, folder.name)
    for shard, path in enumerate(parts):
        mine = rows[shard :: len(parts)]
        lines = [json.dumps(row, ensure_ascii=False) for row in mine]
        content = f"[{',\n'.join(lines)}]\n" if kind == "instruct" else "".join(f"{line}\n" for line in lines)
        write_atomically(path, content.encode())
    return dict(sorted(left_out.items()))


def _row(kind: str, origin: str, content: str | Pair) -> dict[str, Any]:
    if isinstance(content, Pair):
        return {"instruction": content.instruction, "input": content.context, "output": content.answer}
    if kind == "code":
        repository, _, path = origin.partition("/")
        return {"repo_name": repository, "path": path, "language": "Python", "content": content}
    if kind == "prose":
        return {"text": content, "id": origin, "dump": origin.partition("/")[0], "language": "en"}
    return {"text": content, "id": origin}
