"""README.md of an exported model: what it is, what its run recorded, how to load it; what is not known is left out."""

from __future__ import annotations

from collections import Counter

from megatron_palimpsa.config import LAYER_SYMBOLS, ModelConfig
from megatron_palimpsa.export.settings import Dtype
from megatron_palimpsa.training.parameters import count_parameters

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


def model_card(model: ModelConfig, dtype: Dtype, name: str, has_tokenizer: bool, provenance: dict[str, str]) -> str:
    """Markdown about the model `name`."""
    facts = {**_geometry(model), "weights": dtype, **provenance}
    table = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    tags = ["palimpsa", *(["mamba2"] if set(model.layers) & {"P", "M"} else [])]
    listed = "".join(f"- {tag}\n" for tag in tags)
    front = f"---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n{listed}---\n"
    tokenizer = _TOKENIZER.format(place=name) if has_tokenizer else ""
    return f"{front}\n# {name}\n\n| | |\n|---|---|\n{table}\n\n{_HOW.format(place=name, tokenizer=tokenizer)}"


def _geometry(model: ModelConfig) -> dict[str, str]:
    counts = Counter(model.layers)
    layers = ", ".join(f"{counts[letter]} {meaning}" for letter, meaning in LAYER_SYMBOLS.items() if counts[letter])
    return {
        "layers": f"{len(model.layers)}: {layers}",
        "pattern": f"`{model.layers}`",
        "parameters": f"{count_parameters(model):,}",
        "hidden size": f"{model.hidden_size:,}",
        "vocabulary": f"{model.vocab_size:,} ids",
    }
