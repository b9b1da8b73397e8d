"""`prepare`: the demo's tokenizer, sets and blends, from text that is on every machine, by way of what `prep` calls.

FOLDER/sources/          the texts as files (see `demo_files`), as stackv2, fineweb, text and longalpaca read them
FOLDER/tokenizer.model   SentencePiece, 2048 ids (+ tokenizer.json: what it was made from)
FOLDER/sets/{code,prose,long,needles,instruct}-{train,valid}/
FOLDER/blends/{continue-pretraining,long-context,instruct}-{train,valid}.yaml
FOLDER/report.{json,txt}
"""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from palimpsa_data import demo_files, tokenizers
from palimpsa_data.blend import Part, write_blend
from palimpsa_data.demo_files import KINDS, SHARDS
from palimpsa_data.demo_sources import Sources
from palimpsa_data.errors import DataError
from palimpsa_data.files import json_bytes, json_sha256, read_json, sha256_file, write_atomically
from palimpsa_data.jobs import run_job
from palimpsa_data.merge import merge
from palimpsa_data.needles import NeedleOptions
from palimpsa_data.needles.source import NeedleReader, needle_inputs
from palimpsa_data.pipeline import Limits
from palimpsa_data.plan import PrepJob
from palimpsa_data.sets import SetInfo
from palimpsa_data.sources import FineWebOptions, LongAlpacaOptions, StackV2Options, TextOptions, find_inputs

VOCAB_SIZE = 2048
MAX_EXAMPLE_TOKENS = 512
_RECIPE = 1  # part of the tokenizer's hash: raise it when the same sources are to give another one
_SETS = [f"{kind}-{split}" for kind in ("code", "prose", "long", "needles", "instruct") for split in SHARDS]
_READ_AS = {
    "code": ("stackv2", StackV2Options()),
    "prose": ("fineweb", FineWebOptions(min_length=200)),
    "long": ("text", TextOptions()),
    "instruct": ("longalpaca", LongAlpacaOptions()),
}
_NEEDLES = {
    "train": NeedleOptions(documents=160, shards=SHARDS["train"], shortest=512, longest=1000, seed=1),
    "valid": NeedleOptions(documents=16, shards=SHARDS["valid"], shortest=512, longest=1000, seed=2),
}

BLENDS = {
    "continue-pretraining": {"code": 0.6, "prose": 0.4},
    "long-context": {"long": 0.7, "needles": 0.1, "code": 0.1, "prose": 0.1},
    "instruct": {"instruct": 1.0},
}


def prepare(folder: Path, *, progress: Callable[[str], None]) -> dict[str, Any]:
    """Write whatever is missing or damaged under `folder`; -> the report that report.json holds.

    May be killed at any moment and called again; when everything is there it only verifies (below two seconds).

    Raises:
        DataError: no disk space, no standard-library sources.
    """
    sources = Sources()
    progress("text")
    if not demo_files.is_current(folder / "sources", sources):
        # Sets of other texts, from another Python: none of them goes with these.
        shutil.rmtree(folder / "sets", ignore_errors=True)
    left_out = demo_files.write_files(folder / "sources", sources)
    progress("tokenizer")
    tokenizer = _tokenizer(folder / "tokenizer.model", sources)
    infos = {}
    for number, name in enumerate(_SETS, 1):
        run_job(_job(folder, name))
        infos[name], _ = merge(folder / "sets" / name)
        info = infos[name]
        progress(f"set {number}/{len(_SETS)} {name}: {info.documents} documents, {info.tokens} tokens")
    for stage, weights in BLENDS.items():
        for split in SHARDS:
            parts = [Part(folder / "sets" / f"{kind}-{split}", weight) for kind, weight in weights.items()]
            write_blend(folder / "blends" / f"{stage}-{split}.yaml", parts)
    report = _report(sources, tokenizer, infos, left_out)
    _write_if_changed(folder / "report.json", json_bytes(report))
    _write_if_changed(folder / "report.txt", report_text(report).encode())
    return report


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


def _job(folder: Path, name: str) -> PrepJob:
    """What `prep` would make of the same files and flags."""
    kind, _, split = name.partition("-")
    output, tokenizer = folder / "sets" / name, folder / "tokenizer.model"
    if kind == "needles":
        needles = _NEEDLES[split]
        return PrepJob(
            kind=kind,
            inputs=needle_inputs(needles),
            options=needles,
            tokenizer=tokenizer,
            output=output,
            limits=Limits(max_example_tokens=needles.longest),
            loss_mask=True,
            read=NeedleReader(tokenizer, "auto"),
        )
    source, options = _READ_AS[kind]
    return PrepJob(
        kind=source,
        inputs=find_inputs([str(folder / "sources" / name)]),
        options=options,
        tokenizer=tokenizer,
        output=output,
        limits=Limits(max_example_tokens=MAX_EXAMPLE_TOKENS) if kind == "instruct" else Limits(),
        loss_mask=kind == "instruct",
    )


def _report(
    sources: Sources,
    tokenizer: tokenizers.Tokenizer,
    infos: dict[str, SetInfo],
    left_out: dict[str, dict[str, int]],
) -> dict[str, Any]:
    sets = {}
    for name, info in infos.items():
        skipped = Counter(info.skipped) + Counter(left_out.get(name, {}))
        numbers = {key: getattr(info, key) for key in ("documents", "tokens", "trained_tokens", "longest")}
        sets[name] = {**numbers, "skipped": dict(sorted(skipped.items()))}
    return {"sources": sources.versions, "tokenizer": dataclasses.asdict(tokenizer.info), "sets": sets}


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
        training = [text.content for kind in KINDS[:3] for text in demo_files.documents(sources, kind, "train")]
        texts = (text for text in training if isinstance(text, str))
        write_atomically(path, tokenizers.train_sentencepiece(texts, VOCAB_SIZE))
        write_atomically(record, json_bytes({**wanted, "sha256": sha256_file(path)}))
    return tokenizers.load(path)
