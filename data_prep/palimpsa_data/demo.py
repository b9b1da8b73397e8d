"""`prepare`: the demo's tokenizer, eight sets and six blends, from text that is on every machine.

FOLDER/tokenizer.model                  SentencePiece, 2048 ids (+ tokenizer.json: what it was made from)
FOLDER/sets/{code,prose,long,instruct}-{train,valid}/
FOLDER/blends/{continue-pretraining,long-context,instruct}-{train,valid}.yaml
FOLDER/report.{json,txt}
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from palimpsa_data import tokenizers
from palimpsa_data.demo_sources import Sources
from palimpsa_data.documents import Example, Skipped
from palimpsa_data.errors import DataError
from palimpsa_data.files import json_bytes, json_sha256, read_json, sha256_file, write_atomically
from palimpsa_data.instruct import encode_example
from palimpsa_data.sets import SetInfo, write_set
from palimpsa_data.shards import Encoded, ShardSpec, shard_stem, write_shard

VOCAB_SIZE = 2048
MAX_EXAMPLE_TOKENS = 512
_RECIPE = 1  # part of every hash: raise it when the same sources are to give other documents
_TRAIN_SHARDS = 2
_VALID_SHARE = 16  # of 256 origins

BLENDS = {
    "continue-pretraining": {"code": 0.6, "prose": 0.4},
    "long-context": {"long": 0.8, "code": 0.1, "prose": 0.1},
    "instruct": {"instruct": 1.0},
}
_KINDS = ("code", "prose", "long", "instruct")


def prepare(folder: Path, *, progress: Callable[[str], None]) -> dict[str, Any]:
    """Write whatever is missing or damaged under `folder`; -> the report that report.json holds.

    May be killed at any moment and called again; when everything is there it only verifies (below two seconds).

    Raises:
        DataError: no disk space, no standard-library sources.
    """
    sources = Sources()
    progress("tokenizer")
    tokenizer = _tokenizer(folder / "tokenizer.model", sources)
    infos = {}
    plan = [(kind, split) for kind in _KINDS for split in ("train", "valid")]
    for number, (kind, split) in enumerate(plan, 1):
        infos[f"{kind}-{split}"] = info = _set(folder, kind, split, sources, tokenizer)
        progress(f"set {number}/{len(plan)} {kind}-{split}: {info.documents} documents, {info.tokens} tokens")
    for stage, weights in BLENDS.items():
        for split in ("train", "valid"):
            blend = [{"set": f"../sets/{kind}-{split}", "weight": weight} for kind, weight in weights.items()]
            _write_if_changed(folder / "blends" / f"{stage}-{split}.yaml", yaml.safe_dump(blend).encode())
    report = _report(sources, tokenizer, infos)
    _write_if_changed(folder / "report.json", json_bytes(report))
    _write_if_changed(folder / "report.txt", report_text(report).encode())
    return report


def is_valid_share(origin: str) -> bool:
    """Which side of the train/valid split all documents of a module or topic are on."""
    return hashlib.sha256(origin.encode()).digest()[0] < _VALID_SHARE


def report_text(report: dict[str, Any]) -> str:
    """The report as a table for people."""
    versions = ", ".join(f"{name} {version}" for name, version in report["sources"].items())
    lines = [
        f"text of {versions}; {report['tokenizer']['vocab_size']} token ids",
        f"{'set':<16}{'documents':>10}{'tokens':>10}{'trained':>10}{'longest':>9}  skipped",
    ]
    for name, item in report["sets"].items():
        skipped = ", ".join(f"{count} {reason}" for reason, count in item["skipped"].items()) or "-"
        numbers = f"{item['documents']:>10}{item['tokens']:>10}{item['trained_tokens']:>10}{item['longest']:>9}"
        lines.append(f"{name:<16}{numbers}  {skipped}")
    return "\n".join(lines) + "\n"


def _report(sources: Sources, tokenizer: tokenizers.Tokenizer, infos: dict[str, SetInfo]) -> dict[str, Any]:
    keys = ("documents", "tokens", "trained_tokens", "longest", "skipped")
    return {
        "sources": sources.versions,
        "tokenizer": dataclasses.asdict(tokenizer.info),
        "sets": {name: {key: getattr(info, key) for key in keys} for name, info in infos.items()},
    }


def _write_if_changed(path: Path, content: bytes) -> None:
    if not path.is_file() or path.read_bytes() != content:
        write_atomically(path, content)


def _tokenizer(path: Path, sources: Sources) -> tokenizers.Tokenizer:
    """The model file of an earlier call if it is whole and made from these sources, or a new one."""
    record = path.with_suffix(".json")
    wanted = {"input_sha256": sources.sha256, "config_sha256": json_sha256([_RECIPE, VOCAB_SIZE])}
    try:
        made = read_json(record) == {**wanted, "sha256": sha256_file(path)}
    except (OSError, DataError):
        made = False
    if not made:
        texts = (text for kind in _KINDS[:3] for text in _documents(kind, "train", sources) if isinstance(text, str))
        write_atomically(path, tokenizers.train_sentencepiece(texts, VOCAB_SIZE))
        write_atomically(record, json_bytes({**wanted, "sha256": sha256_file(path)}))
    return tokenizers.load(path)


def _documents(kind: str, split: str, sources: Sources) -> Iterator[str | Skipped | Example]:
    for text in sources.documents(kind):
        if is_valid_share(text.origin) == (split == "valid"):
            yield text.content


def _set(folder: Path, kind: str, split: str, sources: Sources, tokenizer: tokenizers.Tokenizer) -> SetInfo:
    name = f"{kind}-{split}"
    shards = _TRAIN_SHARDS if split == "train" else 1
    manifests = {}
    for shard in range(shards):
        stem = shard_stem(folder / "sets" / name, name, shard, shards)
        recipe = [_RECIPE, kind, split, shard, shards, _VALID_SHARE, MAX_EXAMPLE_TOKENS]
        spec = ShardSpec(
            input_sha256=sources.sha256,
            tokenizer_sha256=tokenizer.sha256,
            config_sha256=json_sha256(recipe),
            vocab_size=tokenizer.vocab_size,
            loss_mask=kind == "instruct",
        )
        documents = _encoded(kind, split, shard, shards, sources, tokenizer)
        manifests[stem], _ = write_shard(stem, documents, spec, most_tokens=sources.size)
    return write_set(folder / "sets" / name, name, tokenizer.info, manifests)


def _encoded(
    kind: str, split: str, shard: int, shards: int, sources: Sources, tokenizer: tokenizers.Tokenizer
) -> Iterator[Encoded | Skipped]:
    for number, item in enumerate(_documents(kind, split, sources)):
        if number % shards != shard:
            continue
        if isinstance(item, str):
            yield Encoded(tokenizer.encode_document(item))
        elif isinstance(item, Example):
            yield encode_example(item, tokenizer, MAX_EXAMPLE_TOKENS)
        else:
            yield item
