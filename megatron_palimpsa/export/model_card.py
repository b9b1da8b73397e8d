"""README.md of an exported model: what its run recorded, and how it is loaded. What is not known is left out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_palimpsa.config import LAYER_SYMBOLS, StageConfig
from megatron_palimpsa.export.settings import Dtype
from megatron_palimpsa.training.checkpoint_state import read_state
from megatron_palimpsa.training.metrics import read_records
from megatron_palimpsa.training.parameters import count_parameters
from megatron_palimpsa.training.run_folder import RunFolder

_HOW = """\
## How to load it

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("{place}", dtype="auto", trust_remote_code=True)
{tokenizer}
The model's code is in this folder and needs PyTorch and transformers 5.24 or newer. On a GPU the kernels of the package
`palimpsa_kernels` run where it is installed, plain PyTorch otherwise. `generate` keeps the layers' states; rows of a
batch are padded on the left. `megatron-palimpsa convert huggingface` makes a stage of the folder to train on.
"""
_TOKENIZER = """\
    tokenizer = AutoTokenizer.from_pretrained("{place}", trust_remote_code=True)
    inputs = tokenizer(["A text", "Another text"], padding=True, return_tensors="pt")
    print(tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=32)))
"""


def model_card(
    folder: RunFolder, checkpoint: Path, config: StageConfig, dtype: Dtype, name: str, has_tokenizer: bool
) -> str:
    """Markdown about the model `name` in a checkpoint of a stage's folder."""
    facts = "\n".join(f"| {key} | {value} |" for key, value in _facts(folder, checkpoint, config, dtype))
    front = "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- palimpsa\n- mamba2\n---\n"
    tokenizer = _TOKENIZER.format(place=name) if has_tokenizer else ""
    return f"{front}\n# {name}\n\n| | |\n|---|---|\n{facts}\n\n{_HOW.format(place=name, tokenizer=tokenizer)}"


def _facts(folder: RunFolder, checkpoint: Path, config: StageConfig, dtype: Dtype) -> Iterator[tuple[str, str]]:
    model = config.model
    counts = Counter(model.layers)
    layers = ", ".join(f"{counts[letter]} {meaning}" for letter, meaning in LAYER_SYMBOLS.items() if counts[letter])
    yield "layers", f"{len(model.layers)}: {layers}"
    yield "pattern", f"`{model.layers}`"
    yield "parameters", f"{count_parameters(model):,}"
    yield "hidden size", f"{model.hidden_size:,}"
    yield "vocabulary", f"{model.vocab_size:,} ids"
    yield "weights", dtype
    state = read_state(checkpoint)
    progress = state.get("progress") or {}
    if progress.get("tokens"):
        yield "stage", config.name + (f", after {config.init_from.stage}" if config.init_from else "")
        yield "trained", f"{progress['step']:,} steps, {progress['tokens']:,} tokens of this stage"
        yield "sequence", f"{model.seq_length:,} tokens"
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
